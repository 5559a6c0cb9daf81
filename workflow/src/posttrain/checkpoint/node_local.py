"""Checkpoints on a node's own disk: copied once, verified while they are copied, checked quickly ever after.

Reading terabytes from shared storage at every start is what makes large jobs start slowly. `stage` copies
what the receipts list, file by file, each under its name only when its bytes are known to be right; what is
there and right stays, what is wrong or missing is repaired, what somebody else put there is left alone.

The testimony is the record of a copy: sizes, modification times and the boot of the machine that verified it.
While all of them still agree, `check_copy` believes it without reading; otherwise it reads the copy again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts import FileRecord, Receipt, check_files, hash_file, write_json
from posttrain.checkpoint.file_placement import (
    TransferProgress,
    copy_file,
    explain_full_disk,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.errors import CheckpointError
from posttrain.observability.progress import ProgressBar

log = logging.getLogger(__name__)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Origin:
    """What is to be copied.

    Args:
        folder: Where it lies.
        receipt: What it holds.
    """

    folder: Path
    receipt: Receipt


@dataclass(frozen=True)
class CopiedFile:
    """One file of a copy.

    Args:
        path: Relative to the copy's folder.
        size_bytes: Its length.
        mtime_ns: Its modification time when its content was verified.
    """

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class NodeCopy:
    """What a node holds of one origin.

    Args:
        source: The origin's folder.
        folder: The copy's folder; the same where the origin lies on the node already.
        receipt_digest: Of the origin's receipt.
        files: Every file, with what `check_copy` compares.
        bytes_copied: Written by this call.
        bytes_kept: Found there and right.
    """

    source: str
    folder: str
    receipt_digest: str
    files: tuple[CopiedFile, ...]
    bytes_copied: int
    bytes_kept: int


@dataclass(frozen=True)
class _Task:
    """One file to look at, and to copy where it is not right."""

    source: Path
    target: Path
    record: FileRecord


def stage(origins: Sequence[Origin], destination: Path, workers: int = 8, reread: bool = False) -> list[NodeCopy]:
    """Make `destination` hold a verified copy of every origin, each in a folder of its own name.

    Args:
        origins: What to copy.
        destination: Folder on the node's own disk.
        workers: Files handled at a time.
        reread: Read every written file once more from the disk and compare.

    Returns:
        One record per origin.

    Raises:
        CheckpointError: An origin's file is not what its receipt says, or a copy is not after `reread`.
        RuntimeError: No space on the disk; said before the first byte where it can be known.
    """
    destination.mkdir(parents=True, exist_ok=True)
    away = [origin for origin in origins if not _is_there(origin, destination)]
    for origin in away:
        remove_half_written(destination / origin.folder.name)
    tasks = [task for origin in away for task in _tasks_of(origin, destination)]
    wrong = _find_wrong(tasks, workers)
    require_free_space(destination, sum(t.record.size_bytes for t in wrong), f"the copy to {destination}")
    _copy_all(wrong, destination, workers, reread)
    copied = {task.target for task in wrong}
    return [_describe(origin, destination, copied) for origin in origins]


def ensure_local_copy(origins: Sequence[Origin], destination: Path, testimony: Path) -> None:
    """Make sure that a node has right copies before they are used: believe a testimony that still fits, else stage.

    Args:
        origins: What the node needs.
        destination: Folder on the node's own disk.
        testimony: See `write_testimony`; it may be missing.

    Raises:
        CheckpointError: See `stage`.
        RuntimeError: See `stage`.
    """
    if testimony.exists():
        row = read_testimony(testimony)
        if not any(check_copy(destination / origin.folder.name, origin.receipt, row) for origin in origins):
            return
    log.info("staging to %s first: its copy is not complete", destination)
    stage(origins, destination)


def check_copy(folder: Path, receipt: Receipt, testimony: Mapping[str, Any]) -> list[str]:
    """Check a node's copy before it is used, without reading it where the testimony still holds.

    Args:
        folder: The copy.
        receipt: What it should hold.
        testimony: See `write_testimony`. It is believed when boot, receipt, folder, and every size and
            modification time agree; otherwise the content is read.

    Returns:
        One line per file that is missing or wrong; empty when all is well.
    """
    reason = _doubt(folder, receipt, testimony)
    if not reason:
        return []
    log.info("%s: the copy is read again, because %s", folder, reason)
    return check_files(folder, receipt, content=True)


def write_testimony(path: Path, node: str, destination: Path, copies: Collection[NodeCopy]) -> None:
    """Write what a node's disk holds.

    Args:
        path: The file; its existence means that staging to the node is done.
        node: Name of the node.
        destination: See `stage`.
        copies: What `stage` returned.
    """
    row = {
        "node": node,
        "folder": str(destination),
        "boot_id": read_boot_id(),
        "bytes_copied": sum(copy.bytes_copied for copy in copies),
        "bytes_kept": sum(copy.bytes_kept for copy in copies),
        "copies": [dataclasses.asdict(copy) for copy in copies],
    }
    write_json(path, row)


def read_testimony(path: Path) -> dict[str, Any]:
    """Read what `write_testimony` wrote.

    Raises:
        CheckpointError: When it is missing or not a testimony.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        _ = row["boot_id"], [copy["files"] for copy in row["copies"]]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; staging to this node has not finished") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a testimony ({error!r}); delete it and stage again") from error
    return row


def read_boot_id() -> str:
    """Return the id of this start of the machine."""
    return BOOT_ID.read_text(encoding="ascii").strip()


# ---- copying ----


def _is_there(origin: Origin, destination: Path) -> bool:
    target = destination / origin.folder.name
    if not (target.exists() and target.samefile(origin.folder)):
        return False
    log.info("%s lies on this node already; nothing is copied", origin.folder)
    return True


def _tasks_of(origin: Origin, destination: Path) -> list[_Task]:
    target = destination / origin.folder.name
    return [_Task(origin.folder / r.path, target / r.path, r) for r in origin.receipt.files]


def _find_wrong(tasks: Sequence[_Task], workers: int) -> list[_Task]:
    """Return the files to copy: absent, of another size, or of other content."""
    same_size = [t for t in tasks if t.target.is_file() and t.target.stat().st_size == t.record.size_bytes]
    right = set()
    if same_size:
        with ProgressBar("verify what is there", sum(t.record.size_bytes for t in same_size)) as bar:
            progress = TransferProgress(bar)
            verdicts = run_parallel(lambda task: _is_right(task, progress), same_size, workers, progress)
        right = {task.target for task, verdict in zip(same_size, verdicts, strict=True) if verdict}
    wrong = [task for task in tasks if task.target not in right]
    for task in wrong:
        if task.target.exists():
            log.warning("%s is not what the receipt says and is copied again", task.target)
    return wrong


def _is_right(task: _Task, progress: TransferProgress) -> bool:
    verdict = hash_file(task.target) == task.record.xxh3_128
    progress.advance(task.record.size_bytes)
    return verdict


def _copy_all(tasks: Sequence[_Task], destination: Path, workers: int, reread: bool) -> None:
    if not tasks:
        return
    largest_first = sorted(tasks, key=lambda task: -task.record.size_bytes)
    total = sum(task.record.size_bytes for task in tasks)
    with ProgressBar(f"copy to {destination}", total) as bar, explain_full_disk(destination):
        progress = TransferProgress(bar)
        run_parallel(lambda task: _copy(task, progress, reread), largest_first, workers, progress)


def _copy(task: _Task, progress: TransferProgress, reread: bool) -> None:
    def check(found: str) -> None:
        if found != task.record.xxh3_128:
            raise CheckpointError(
                f"{task.source}: content differs from its receipt (xxh3_128 {found}, expected "
                f"{task.record.xxh3_128})\n  remedy: delete that receipt and run its step again"
            )

    copy_file(task.source, task.target, progress, check)
    if reread and hash_file(task.target) != task.record.xxh3_128:
        task.target.unlink()
        raise CheckpointError(f"{task.target}: reads back other bytes than were written; is the disk bad?")


def _describe(origin: Origin, destination: Path, copied: Collection[Path]) -> NodeCopy:
    folder = destination / origin.folder.name
    files, bytes_copied = [], 0
    for record in origin.receipt.files:
        status = (folder / record.path).stat()
        files.append(CopiedFile(record.path, status.st_size, status.st_mtime_ns))
        bytes_copied += status.st_size if folder / record.path in copied else 0
    kept = origin.receipt.size_bytes - bytes_copied
    digest = origin.receipt.digest
    return NodeCopy(str(origin.folder), str(folder), digest, tuple(files), bytes_copied, kept)


# ---- the quick check ----


def _doubt(folder: Path, receipt: Receipt, testimony: Mapping[str, Any]) -> str:
    """Return why the testimony is not enough, or an empty text."""
    if testimony["boot_id"] != read_boot_id():
        return "the machine was restarted since"
    for copy in testimony["copies"]:
        if copy["folder"] == str(folder) and copy["receipt_digest"] == receipt.digest:
            return _first_difference(folder, receipt, copy["files"])
    return "the testimony is about other content"


def _first_difference(folder: Path, receipt: Receipt, files: Collection[Mapping[str, Any]]) -> str:
    known = {file["path"]: (file["size_bytes"], file["mtime_ns"]) for file in files}
    for record in receipt.files:
        path = folder / record.path
        status = path.stat() if path.is_file() else None
        if status is None or known.get(record.path) != (status.st_size, status.st_mtime_ns):
            return f"{record.path} changed or disappeared"
    return ""

"""Checkpoints on a node's local disk: copied and verified once, then checked quickly.

Reading terabytes from shared storage at every start makes large jobs start slowly. `stage` copies the files in the
receipts, each under its name only after its bytes are verified; it keeps correct files, repairs wrong or missing ones,
and ignores other users' files.

A file that no process on this node reads may be left out (`StagedSource.local`): a link to the shared file replaces it,
so that the folder is complete.

Files that match the record of an earlier staging are not read again (`staging_record`). Before the weights are loaded,
`read_again` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpoint.parts.fill_folder import keep_right_files, make_files
from posttrain.checkpoint.staging.eviction import Eviction, in_use, make_room
from posttrain.checkpoint.staging.file_placement import (
    TransferProgress,
    copy_file,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.checkpoint.staging.staging_record import (
    CopiedFile,
    StagedCopy,
    known_files,
    vouched_files,
    write_staging_record,
)
from posttrain.errors import CheckpointError
from posttrain.readable import format_bytes
from posttrain.report.progress import ProgressBar
from posttrain.store import FileRecord, Receipt, check_files, hash_file, refuse_files, require_files, sync_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedSource:
    """A folder to copy.

    Args:
        folder: Source folder.
        receipt: Receipt of its content.
        local: Names of the files to copy, by default all; the others become links.
    """

    folder: Path
    receipt: Receipt
    local: frozenset[str] | None = None

    @property
    def local_receipt(self) -> Receipt:
        """The receipt restricted to the copied files."""
        if self.local is None:
            return self.receipt
        return dataclasses.replace(self.receipt, files=tuple(r for r in self.receipt.files if r.path in self.local))


@dataclass(frozen=True)
class CopyTask:
    """One file to check, and to copy if it is wrong.

    Args:
        source: Source file.
        target: Destination of the copy.
        record: Expected size and hash.
    """

    source: Path
    target: Path
    record: FileRecord

    @property
    def path(self) -> str:
        """Path of the copy, because two origins may contain the same name."""
        return str(self.target)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.record.size_bytes


# Copies tasks: (files to copy, correct local files); see `broadcast.Broadcast.fetch`.
Fetch = Callable[[Sequence[CopyTask], Sequence[CopyTask]], None]


def stage(
    origins: Sequence[StagedSource],
    destination: Path,
    workers: int = 8,
    reread: bool = False,
    eviction: Eviction | None = None,
    fetch: Fetch | None = None,
    believe: bool = True,
) -> list[StagedCopy]:
    """Make `destination` hold a verified copy of every origin, each in a folder with the origin's name.

    Args:
        origins: Folders to copy.
        destination: Folder on the node's local disk.
        workers: Number of files processed at a time.
        reread: Read every written file from the disk again and compare.
        eviction: Rule for deleting old copies; by default none is deleted.
        fetch: Copies the files by other means than reading each from its origin.
        believe: Trust the staging record instead of reading its files.

    Returns:
        One record per origin.

    Raises:
        CheckpointError: An origin's file does not match its receipt, a copy is wrong after `reread`, or the destination
            belongs to another user.
        OSError: The disk is full; raised before the first byte if it can be predicted.
    """
    destination.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(destination)
    away = [origin for origin in origins if not _is_there(origin, destination)]
    with in_use([destination / origin.folder.name for origin in away]):
        for origin in away:
            remove_half_written(destination / origin.folder.name)
        tasks = [task for origin in away for task in _tasks_of(origin, destination)]
        wrong = _find_wrong(tasks, destination, workers, believe)
        needed = sum(task.record.size_bytes for task in wrong)
        if eviction:
            make_room(needed, destination, eviction)
        require_free_space(destination, needed, f"the copy to {destination}")
        targets = {task.target for task in wrong}
        for origin in away if wrong else ():
            write_staging_record(_describe(origin, destination, targets, is_done=False))
        if fetch and wrong:
            fetch(wrong, [task for task in tasks if task.target not in targets])
        elif wrong:
            make_files(Copier(reread), destination, wrong, f"the copy to {destination}", workers)
        for origin in away:
            _link_others(origin, destination)
        copies = [_describe(origin, destination, targets) for origin in origins]
        for copy in copies:
            if copy.folder != copy.source:
                write_staging_record(copy)
    return copies


def read_again(origins: Sequence[StagedSource], workers: int = 8) -> list[str]:
    """Read every local file of `origins` and compare its hash, right before it is loaded.

    A staging record covers names, sizes and times; a disk may still return other bytes. The bytes stay in the page
    cache as far as memory allows, so that loading does not read the disk again.

    Args:
        origins: Sources with the folders to load.
        workers: Number of files read at a time.

    Returns:
        One line per file that is missing or wrong; empty if all are correct.
    """
    checks = [
        (origin.folder, dataclasses.replace(origin.receipt, files=(record,)))
        for origin in origins
        for record in origin.local_receipt.files
    ]
    with _reading("read before loading", sum(receipt.size_bytes for _, receipt in checks)) as progress:

        def check(item: tuple[Path, Receipt]) -> list[str]:
            found = check_files(*item, content=True)
            progress.advance(item[1].size_bytes)
            return found

        return [line for lines in run_parallel(check, checks, workers, progress) for line in lines]


def require_content(folder: Path, receipt_path: Path, workers: int = 8) -> Receipt:
    """Return the receipt of a checkpoint to load, after reading the whole checkpoint.

    Raises:
        CheckpointError: Files differ from the receipt; lists them.
    """
    receipt = require_files(folder, receipt_path)
    refuse_files(folder, receipt_path, read_again([StagedSource(folder, receipt)], workers))
    return receipt


@contextlib.contextmanager
def _reading(label: str, total_bytes: int) -> Iterator[TransferProgress]:
    """Show the progress of a read, and log its rate at the end."""
    started = time.monotonic()
    with ProgressBar(label, total_bytes) as bar:
        yield TransferProgress(bar)
    rate = total_bytes / max(time.monotonic() - started, 1e-3)
    log.info("%s: %s at %s/s", label, format_bytes(total_bytes), format_bytes(rate))


def _refuse_foreign(destination: Path) -> None:
    """Reject a folder whose owner could replace the bytes after the check; below the root, all folders are ours."""
    for folder in (destination, *destination.absolute().parents[:2]):
        owner = folder.stat().st_uid
        if owner not in (os.geteuid(), 0):
            remedy = "set site.node_local to a folder of your own"
            raise CheckpointError(
                "folder-of-another-user",
                f"{folder}: belongs to user {owner}, who can change the copies\n  remedy: {remedy}",
            )


# ---- copying ----


def _is_there(origin: StagedSource, destination: Path) -> bool:
    target = destination / origin.folder.name
    if not (target.exists() and target.samefile(origin.folder)):
        return False
    log.info("%s lies on this node already; nothing is copied", origin.folder)
    return True


def _tasks_of(origin: StagedSource, destination: Path) -> list[CopyTask]:
    target = destination / origin.folder.name
    return [CopyTask(origin.folder / r.path, r.path.below(target), r) for r in origin.local_receipt.files]


def _find_wrong(tasks: Sequence[CopyTask], destination: Path, workers: int, believe: bool) -> list[CopyTask]:
    """Return the files to copy: missing, or with another size or content."""
    folders = {_folder_of(task) for task in tasks} if believe else set()
    known = {path: content for folder in folders for path, content in vouched_files(folder).items()}
    right = {task.path for task in tasks if known.get(task.target) == task.record.xxh3_128}
    doubtful = [task for task in tasks if task.target not in known and not task.target.is_symlink()]
    right |= keep_right_files(Copier(), destination, doubtful, "what is there", workers).keys()
    return [task for task in tasks if task.path not in right]


def _folder_of(task: CopyTask) -> Path:
    return task.target.parents[task.record.path.count("/")]


class Copier:
    """Copies files from their origins; see `fill_folder.Maker`.

    Args:
        reread: Read every copy from the disk again and compare.
    """

    def __init__(self, reread: bool = False):
        self._reread = reread

    def check(self, task: CopyTask, folder: Path) -> tuple[CopyTask | None, str]:
        """Compare a copy with the receipt."""
        is_right = task.target.stat().st_size == task.size_bytes and hash_file(task.target) == task.record.xxh3_128
        return (task, "") if is_right else (None, "not what the receipt says")

    def missing_bytes(self, task: CopyTask, folder: Path) -> int:
        """Return the whole size."""
        return task.size_bytes

    def make(self, task: CopyTask, folder: Path, progress: TransferProgress) -> CopyTask:
        """Copy one file durably from its origin, and verify it against its receipt.

        Raises:
            CheckpointError: The file does not match, or its copy does not on read-back.
        """

        def check(found: str) -> None:
            if found != task.record.xxh3_128:
                raise CheckpointError(
                    "source-changed",
                    f"{task.source}: content differs from its receipt (xxh3_128 {found}, expected "
                    f"{task.record.xxh3_128})\n  remedy: delete that receipt and run its step again",
                )

        copy_file(task.source, task.target, progress, check)
        if self._reread and hash_file(task.target) != task.record.xxh3_128:
            task.target.unlink()
            raise CheckpointError(
                "disk-corrupts", f"{task.target}: reads back other bytes than were written; check the disk"
            )
        return task


# ---- links and records ----


def _link_others(origin: StagedSource, destination: Path) -> None:
    """Link to the origin's other files; existing files, copied for another share, are kept."""
    if origin.local is None:
        return
    folder, source = destination / origin.folder.name, origin.folder.absolute()
    changed = set()
    for record in origin.receipt.files:
        target = record.path.below(folder)
        if record.path in origin.local or (target.is_file() and not target.is_symlink()):
            continue
        if not target.is_symlink() or target.readlink() != source / record.path:
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                target.unlink()
            target.symlink_to(source / record.path)
            changed.add(target.parent)
    for parent in changed:
        sync_folder(parent)


def _describe(origin: StagedSource, destination: Path, copied: Collection[Path], is_done: bool = True) -> StagedCopy:
    folder = destination / origin.folder.name
    before = {} if folder.samefile(origin.folder) else known_files(folder)
    files = [_describe_file(folder / r.path, r, before, copied, is_done) for r in origin.local_receipt.files]
    bytes_copied = sum(r.size_bytes for r in origin.local_receipt.files if folder / r.path in copied)
    names = {record.path for record in origin.local_receipt.files}
    return StagedCopy(
        source=str(origin.folder),
        folder=str(folder),
        receipt_digest=origin.receipt.digest,
        files=tuple(files),
        links=tuple(record.path for record in origin.receipt.files if record.path not in names),
        bytes_copied=bytes_copied,
        bytes_kept=origin.local_receipt.size_bytes - bytes_copied,
    )


def _describe_file(
    path: Path, record: FileRecord, before: Mapping[str, CopiedFile], copied: Collection[Path], is_done: bool
) -> CopiedFile:
    was_ours = record.path in before and before[record.path].is_ours
    if path in copied and not is_done:
        # A file that appears under a free name is ours, even if this staging is killed.
        mtime_ns, is_ours = 0, was_ours or path.is_symlink() or not path.exists()
    else:
        mtime_ns, is_ours = path.stat().st_mtime_ns, was_ours or path in copied
    return CopiedFile(record.path, record.size_bytes, record.xxh3_128, mtime_ns, is_ours)

"""The receipt that proves a step done: written last, and read by every step that uses the artefact.

    if claim(path, Receipt(step, (), inputs, settings), folder):
        ...                                                     # make the files
        write_receipt(path, Receipt(step, files, inputs, settings))

Between the two calls no other process makes the same artefact (`build_lock`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.errors import CheckpointError
from posttrain.store import build_lock
from posttrain.store.durable import append_json_line, hash_file, write_json
from posttrain.store.format_versions import FORMAT_VERSIONS
from posttrain.store.names import RelativeName, check_digest
from posttrain.store.paths import part_receipt_of, partial_of
from posttrain.store.plain_json import read_json

log = logging.getLogger(__name__)

# Folder in which the caller keeps copies of outputs that a step updates, to restore them if the step fails.
BACKUPS_VARIABLE = "POSTTRAIN_BACKUPS"


@dataclass(frozen=True)
class FileRecord:
    """One file of an artefact.

    Args:
        path: Path in the artefact's folder, with "/"; untrusted text is checked.
        size_bytes: Size in bytes.
        xxh3_128: Hash of the content, 32 hex digits.
        sha256: The Hub's hash of the content, if the Hub has one; checked when the file was fetched.
    """

    path: RelativeName
    size_bytes: int
    xxh3_128: str
    sha256: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", RelativeName(self.path))
        check_digest(self.xxh3_128, 32)
        check_digest(self.sha256, 64)


@dataclass(frozen=True)
class Receipt:
    """The outputs, inputs and settings of a finished step.

    Args:
        step: Name of the rule.
        files: Files that the step wrote, sorted by path.
        inputs: Name -> digest of the input's receipt.
        settings: Other values that determine the content.
    """

    step: str
    files: tuple[FileRecord, ...]
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the receipt's content: equal digests mean equal bytes made in the same way."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(record.size_bytes for record in self.files)

    def _content(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "format_version": FORMAT_VERSIONS[self.step],
            "files": [dataclasses.asdict(record) for record in sorted(self.files, key=lambda r: r.path)],
            "inputs": dict(self.inputs),
            "settings": dict(self.settings),
        }


def claim(path: Path, wanted: Receipt, folder: Path, sources: Iterable[Path] = (), parts: Iterable[Path] = ()) -> bool:
    """Return whether an artefact has to be made; if so, this process holds its lock until `write_receipt`.

    Another user's run may have made the artefact since this run was planned. If another process is making it, wait for
    that process. A receipt that does not match, or whose files are missing, is removed.

    Args:
        path: Path of the receipt.
        wanted: The expected receipt: step, inputs, and at least these settings and files.
        folder: The artefact, under its final name.
        sources: Input files outside the store; the artefact is remade if one was written or replaced after the
            receipt.
        parts: Receipts of the artefact's parts, which no other process remakes meanwhile.
    """
    sources = tuple(sources)
    if _is_made(path, wanted, folder, sources):
        log.info("%s: is there already", folder)
        return False
    build_lock.hold(path, parts)
    if _is_made(path, wanted, folder, sources):
        log.info("%s: was made meanwhile", folder)
        build_lock.release(path)
        return False
    # If this step fails, the old receipt of the changed files must not be restored.
    if backups := os.environ.get(BACKUPS_VARIABLE):
        (Path(backups) / path.relative_to(path.anchor)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return True


def _is_made(path: Path, wanted: Receipt, folder: Path, sources: Sequence[Path]) -> bool:
    try:
        receipt, made = read_receipt(path), path.stat().st_mtime
    except (CheckpointError, FileNotFoundError):
        return False
    is_part = path.parent.name.endswith(".parts")
    return (
        (receipt.step, dict(receipt.inputs)) == (wanted.step, dict(wanted.inputs))
        and all(receipt.settings.get(key) == value for key, value in wanted.settings.items())
        and set(wanted.files) <= set(receipt.files)
        and not check_files(partial_of(folder) if is_part and not folder.exists() else folder, receipt)
        and all(_changed(source) <= made for source in sources)
    )


def _changed(path: Path) -> float:
    """Return when a file's content or inode last changed; `cp -p`, `mv` and `rsync -a` keep only the former."""
    status = path.stat()
    return max(status.st_mtime, status.st_ctime)


def write_receipt(path: Path, receipt: Receipt, started: float | None = None) -> None:
    """Mark a step as done. Call this last, after the data is on disk.

    Args:
        path: See `receipt_of`.
        receipt: The receipt.
        started: `time.time()` at the start of the step, which is logged outside the receipt.
    """
    seconds = None if started is None else round(time.time() - started, 3)
    history = {
        "step": receipt.step,
        "finished_unix": round(time.time(), 3),
        "seconds": seconds,
        "host": socket.gethostname(),
        "posttrain": __version__,
        "bytes": receipt.size_bytes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    log_path = path.with_name(path.name.removesuffix(".receipt.json").removesuffix(".json") + ".history.jsonl")
    append_json_line(log_path, history)
    build_lock.confirm(path)
    write_json(path, {**receipt._content(), "digest": receipt.digest})
    build_lock.release(path)


def read_receipt(path: Path) -> Receipt:
    """Read a receipt and verify its digest.

    Raises:
        CheckpointError: The receipt is missing or unreadable, or its digest does not match its content.
    """
    try:
        row = read_json(path)
        files = tuple(FileRecord(**record) for record in row["files"])
        receipt = Receipt(str(row["step"]), files, dict(row["inputs"]), dict(row["settings"]))
        version, digest = row["format_version"], str(row["digest"])
    except FileNotFoundError as error:
        raise CheckpointError(
            "receipt-missing", f"{path}: no such receipt; the step before has not finished"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("receipt-invalid", f"{path}: not a receipt ({error}); delete it and run again") from error
    if receipt.step not in FORMAT_VERSIONS:
        raise CheckpointError(
            "receipt-of-unknown-step",
            f"{path}: of a step {receipt.step!r}, which does not exist; delete it and run again",
        )
    if version != FORMAT_VERSIONS[receipt.step] or digest != receipt.digest:
        raise CheckpointError(
            "receipt-changed",
            f"{path}: written by another version or changed by hand (format {version!r}, digest {digest[:12]!r}, "
            f"computed {receipt.digest[:12]!r}); delete it and run again",
        )
    return receipt


def read_records(path: Path) -> tuple[FileRecord, ...]:
    """Read a list of files with their hashes: a training checkpoint's `manifest.json`.

    Raises:
        CheckpointError: The file cannot be read, or is not such a list.
    """
    try:
        rows = read_json(path)
        if not isinstance(rows, list) or not rows:
            raise ValueError("no list of files")
        return tuple(FileRecord(**row) for row in rows)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError("record-unreadable", f"{path}: cannot be read ({error})") from error


def record_file(folder: Path, name: str, sha256: str = "") -> FileRecord:
    """Read a file of `folder` and return its record."""
    relative = RelativeName(name, folder)
    path = folder / relative
    return FileRecord(relative, path.stat().st_size, hash_file(path), sha256)


def record_files(folder: Path, names: Iterable[str] | None = None) -> tuple[FileRecord, ...]:
    """Return the records of `names`, by default of all regular files below `folder`, sorted by path."""
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(record_file(folder, name) for name in sorted(names))


def check_files(folder: Path, receipt: Receipt, content: bool = False) -> list[str]:
    """Compare a folder with its receipt.

    Args:
        folder: The artefact.
        receipt: Its receipt.
        content: Also read every byte and compare the hashes.

    Returns:
        One line per file that is missing or has another size or content.
    """
    found = []
    for record in receipt.files:
        path = folder / record.path
        if not path.is_file():
            found.append(f"{path}: missing, expected {record.size_bytes} bytes")
        elif path.stat().st_size != record.size_bytes:
            found.append(f"{path}: {path.stat().st_size} bytes, expected {record.size_bytes}")
        elif content and hash_file(path) != record.xxh3_128:
            found.append(f"{path}: content differs from its receipt (xxh3_128 {record.xxh3_128})")
    return found


def require_files(folder: Path, receipt_path: Path, content: bool = False) -> Receipt:
    """Return the receipt of `folder` after `check_files`.

    Raises:
        CheckpointError: Lists every file that differs from the receipt, and the remedy.
    """
    receipt = read_receipt(receipt_path)
    refuse_files(folder, receipt_path, check_files(folder, receipt, content))
    return receipt


def refuse_files(folder: Path, receipt_path: Path, found: Sequence[str]) -> None:
    """Raise an error that lists an artefact's faults and the remedy, if there are any.

    Args:
        folder: The artefact.
        receipt_path: Its receipt.
        found: One line per file that differs from the receipt.

    Raises:
        CheckpointError: Contains all lines.
    """
    if not found:
        return
    listed = "\n  ".join(found)
    # Parts verify their files by hash and remake only damaged ones.
    parts = part_receipt_of(folder, "*")
    remedy = f"rm {receipt_path}{f' {parts}' if parts.parent.exists() else ''} and run again"
    raise CheckpointError("receipt-mismatch", f"{folder} is not what its receipt says:\n  {listed}\n  remedy: {remedy}")

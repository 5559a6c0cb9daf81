"""The receipt that proves a step done: written last, read by every step that uses what it names.

    if claim(path, Receipt(step, (), inputs, settings), folder):
        ...                                                     # make the files
        write_receipt(path, Receipt(step, files, inputs, settings))

Between the two nobody else makes the same artefact (`build_lock`).
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

# Names the folder where whoever runs this step keeps copies of outputs that it updates, to put them back when it fails.
BACKUPS_VARIABLE = "POSTTRAIN_BACKUPS"


@dataclass(frozen=True)
class FileRecord:
    """One file of an artefact.

    Args:
        path: Inside the artefact's folder, with "/"; whatever text is given is checked.
        size_bytes: Its length.
        xxh3_128: Hash of its content, 32 hex digits.
        sha256: The Hub's hash of it, where the Hub gives one; checked when the file was fetched.
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
    """What a finished step made, from which inputs and settings.

    Args:
        step: Name of the rule.
        files: What it wrote, sorted by path.
        inputs: Name -> digest of the receipt it was made from.
        settings: What else decides the content.
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
        """Bytes of all files together."""
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
    """Return whether an artefact has to be made; if so, this process is the only one to make it until `write_receipt`.

    Another user's run may have made it since this one was planned. If another is making it, this waits for the other. A
    receipt for something else than what is wanted, or for files that are gone, is removed.

    Args:
        path: Of the receipt.
        wanted: What the receipt must say: step, inputs, at least these settings and files.
        folder: The artefact, under its final name.
        sources: Files outside the store that it is made from; one that was written, or has taken another's place, after
            the receipt makes it be made anew.
        parts: Receipts of the parts it consists of; nobody makes them anew meanwhile.
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
    # Should this step fail, nobody must put back the receipt of what it has changed.
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
    """Return when a file got its content or, with an older one, its name: `cp -p`, `mv` and `rsync -a` keep times."""
    status = path.stat()
    return max(status.st_mtime, status.st_ctime)


def write_receipt(path: Path, receipt: Receipt, started: float | None = None) -> None:
    """Make a step count as done. Call it last, after the data is on disk.

    Args:
        path: See `receipt_of`.
        receipt: What was made.
        started: `time.time()` at the start of the step; goes into the log beside the receipt, not into the receipt.
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
        CheckpointError: When it is missing, unreadable, or its digest does not fit its content.
    """
    try:
        row = read_json(path)
        files = tuple(FileRecord(**record) for record in row["files"])
        receipt = Receipt(str(row["step"]), files, dict(row["inputs"]), dict(row["settings"]))
        version, digest = row["format_version"], str(row["digest"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such receipt; the step before has not finished") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a receipt ({error}); delete it and run again") from error
    if receipt.step not in FORMAT_VERSIONS:
        raise CheckpointError(f"{path}: of a step {receipt.step!r}, which does not exist; delete it and run again")
    if version != FORMAT_VERSIONS[receipt.step] or digest != receipt.digest:
        raise CheckpointError(
            f"{path}: written by another version or changed by hand (format {version!r}, digest {digest[:12]!r}, "
            f"computed {receipt.digest[:12]!r}); delete it and run again"
        )
    return receipt


def read_records(path: Path) -> tuple[FileRecord, ...]:
    """Read a list of files with their hashes: a training checkpoint's `manifest.json`.

    Raises:
        CheckpointError: It cannot be read, or is something else.
    """
    try:
        rows = read_json(path)
        if not isinstance(rows, list) or not rows:
            raise ValueError("no list of files")
        return tuple(FileRecord(**row) for row in rows)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


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
        receipt: What it should hold.
        content: Also read every byte and compare the hashes.

    Returns:
        One line per file that is missing, of another size or of other content; empty when all is well.
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
        CheckpointError: Listing every file that is not as the receipt says, and what to do.
    """
    receipt = read_receipt(receipt_path)
    refuse_files(folder, receipt_path, check_files(folder, receipt, content))
    return receipt


def refuse_files(folder: Path, receipt_path: Path, found: Sequence[str]) -> None:
    """Say what is wrong with an artefact and what to do; nothing happens when nothing was found.

    Args:
        folder: The artefact.
        receipt_path: Its receipt.
        found: One line per file that is not as the receipt says.

    Raises:
        CheckpointError: With all lines.
    """
    if not found:
        return
    listed = "\n  ".join(found)
    # Parts check what they made by its hash, and make only what is wrong anew.
    parts = part_receipt_of(folder, "*")
    remedy = f"rm {receipt_path}{f' {parts}' if parts.parent.exists() else ''} and run again"
    raise CheckpointError(f"{folder} is not what its receipt says:\n  {listed}\n  remedy: {remedy}")

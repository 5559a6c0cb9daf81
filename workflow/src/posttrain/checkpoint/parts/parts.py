"""Folders that are made file by file, by one job or by several that know nothing of each other.

While it is made, the folder is `{folder}.partial`. Beside it, `{folder}.parts` holds a description of each
file that is finished: what it was made from, its size and hash, and what the last step must know about it.
A file is described after it is on disk under its name, so after a kill the next attempt keeps every file
whose description and content agree and writes the others again. When a part's files are done it writes its
receipt; the last step reads the receipts of all parts, checks them against the files, and gives the folder
its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.artifacts import (
    FileRecord,
    Receipt,
    RelativeName,
    hash_file,
    part_receipt_of,
    partial_of,
    read_json,
    read_receipt,
    receipt_of,
    sync_folder,
    write_atomic,
    write_json,
    write_receipt,
)
from posttrain.checkpoint.formats.shard_writer import HashingFile
from posttrain.checkpoint.staging.file_placement import (
    TransferProgress,
    copy_plainly,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.errors import CheckpointError
from posttrain.observability.progress import ProgressBar

log = logging.getLogger(__name__)

Notes = Mapping[str, Any]


@dataclass(frozen=True)
class OutputFile:
    """A file of the folder, as a function of what it is made from.

    Args:
        name: Its name in the folder.
        size_bytes: About how large it will be: for progress and the check of free space.
        made_from: Everything that decides its content, as JSON; a change makes it be written again.
        write: Writes it and returns what the last step must know about it, as JSON.
    """

    name: str
    size_bytes: int
    made_from: Mapping[str, Any]
    write: Callable[[HashingFile], Notes]


@dataclass(frozen=True)
class Description:
    """A finished file.

    Args:
        record: Name, size and hash.
        made_from: Digest of `OutputFile.made_from`.
        notes: What `OutputFile.write` returned.
    """

    record: FileRecord
    made_from: str
    notes: Notes


# ---- making files ----


def make_files(folder: Path, files: Sequence[OutputFile], label: str, num_threads: int = 1) -> list[Description]:
    """Make every file that an earlier attempt has not made already.

    Args:
        folder: Final name of the folder that the files will belong to.
        files: What to make.
        label: Of the progress bar.
        num_threads: Files written at a time.

    Returns:
        Their descriptions, in order.

    Raises:
        OSError: When the disk is too small or became full; what is complete is kept.
    """
    home = FolderInTheMaking(folder)
    missing = [file for file in files if not home.seems_finished(file)]
    require_free_space(home.path, sum(file.size_bytes for file in missing), label)
    total = sum(file.size_bytes for file in files)
    with ProgressBar(label, total) as bar:
        progress = TransferProgress(bar)
        return run_parallel(lambda file: home.make(file, progress), files, num_threads, progress)


def current_path(folder: Path) -> Path:
    """Return where the files of `folder` are now: under its final name, or under its partial one."""
    return folder if folder.exists() else partial_of(folder)


class FolderInTheMaking:
    """The folder of several jobs' files: `.partial`, or finished and opened again when a file must be remade.

    Args:
        folder: Its final name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.exists():
            partial_of(folder).mkdir(parents=True, exist_ok=True)
            remove_half_written(partial_of(folder))
        parts = description_path(folder, "").parent
        if parts.exists():
            remove_half_written(parts)

    @property
    def path(self) -> Path:
        """Where the files are now."""
        return current_path(self.folder)

    def seems_finished(self, file: OutputFile) -> bool:
        """Tell from the description and the size alone whether a file is there."""
        known, path = self._description(file), self.path / file.name
        return known is not None and path.is_file() and path.stat().st_size == known.record.size_bytes

    def make(self, file: OutputFile, progress: TransferProgress) -> Description:
        """Return the description of a file, after making it unless it is there with the right content."""
        known = self._description(file)
        if known and self.seems_finished(file) and hash_file(self.path / file.name) == known.record.xxh3_128:
            progress.advance(file.size_bytes)
            return known
        self._reopen()
        made = self._write(file, progress)
        write_json(self._description_path(file.name), dataclasses.asdict(made))
        return made

    def _write(self, file: OutputFile, progress: TransferProgress) -> Description:
        made: list[Description] = []
        left = file.size_bytes

        def count(written: int) -> None:
            # What was announced is the tensors; a header comes on top of it.
            nonlocal left
            counted = min(written, left)
            left -= counted
            progress.advance(counted)

        def write(opened: BinaryIO) -> None:
            with HashingFile(opened, count) as output:
                notes = file.write(output)
            record = FileRecord(RelativeName(file.name), output.size_bytes, output.xxh3_128)
            made.append(Description(record, digest(file.made_from), notes))

        write_atomic(self.path / file.name, write)
        return made[0]

    def _reopen(self) -> None:
        """Make the folder partial again before anything in it changes; it must not claim to be complete."""
        if self.folder.exists():
            receipt_of(self.folder).unlink(missing_ok=True)
            sync_folder(self.folder.parent)
            # Another thread or another part may have been faster.
            with contextlib.suppress(FileNotFoundError):
                self.folder.rename(partial_of(self.folder))

    def _description(self, file: OutputFile) -> Description | None:
        path = self._description_path(file.name)
        if not path.exists():
            return None
        known = _read_description(path)
        return known if known.made_from == digest(file.made_from) else None

    def _description_path(self, name: str) -> Path:
        return description_path(self.folder, name)


def description_path(folder: Path, name: str) -> Path:
    """Return where the description of a file of `folder` is kept."""
    return folder.with_name(f"{folder.name}.parts") / f"{name}.json"


def digest(content: Any) -> str:
    """Return the SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_description(path: Path) -> Description:
    try:
        row = read_json(path)
        return Description(FileRecord(**row["record"]), row["made_from"], row["notes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a description ({error}); delete it and run again") from error


# ---- parts ----


def write_part_receipt(
    path: Path,
    step: str,
    part: int,
    num_parts: int,
    made: Sequence[Description],
    inputs: Mapping[str, str],
    started: float,
) -> None:
    """Make a part count as done.

    Args:
        path: See `artifacts.part_receipt_of`.
        step: Name of the rule.
        part: Its number, from 0.
        num_parts: How many parts there are.
        made: Its files.
        inputs: Digests of the receipts that it was made from.
        started: `time.time()` at the start of the part.
    """
    settings = {"part": part, "num_parts": num_parts, "notes": digest([item.notes for item in made])}
    files = tuple(sorted((item.record for item in made), key=lambda record: record.path))
    write_receipt(path, Receipt(step, files, inputs, settings), started)


def read_parts(folder: Path, receipts: Sequence[Path], step: str, inputs: Mapping[str, str]) -> dict[str, Description]:
    """Read what all parts made, and check that it is whole and that the files are there.

    Args:
        folder: Final name of the folder.
        receipts: The parts' receipts, in any order.
        step: The rule that made them.
        inputs: What each part must have been made from.

    Returns:
        File name -> description, sorted by name.

    Raises:
        CheckpointError: Listing every part that is missing or made from something else, and every file that
            is missing or of another size.
    """
    read = {path: read_receipt(path) for path in receipts}
    wrong = [f"{path}: {why}" for path, receipt in read.items() if (why := _misfit(receipt, step, inputs))]
    parts = sorted(receipt.settings.get("part", -1) for receipt in read.values())
    counts = sorted({receipt.settings.get("num_parts", -1) for receipt in read.values()})
    if parts != list(range(len(receipts))) or counts != [len(receipts)]:
        wrong.append(f"parts {parts} of {counts}, expected each of 0 to {len(receipts) - 1} once")
    if wrong:
        raise CheckpointError(f"{folder}: the parts do not fit:\n  " + "\n  ".join(wrong))
    records = sorted((r for receipt in read.values() for r in receipt.files), key=lambda record: record.path)
    return {record.path: _described(folder, record) for record in records}


def _misfit(receipt: Receipt, step: str, inputs: Mapping[str, str]) -> str:
    if receipt.step != step:
        return f"made by {receipt.step}, expected {step}"
    if dict(receipt.inputs) != dict(inputs):
        return "made from another source; delete it and run again"
    return ""


def _described(folder: Path, record: FileRecord) -> Description:
    known = _read_description(description_path(folder, record.path))
    path = current_path(folder) / record.path
    size = path.stat().st_size if path.is_file() else None
    if known.record != record or size != record.size_bytes:
        found = "missing" if size is None else f"{size} bytes"
        raise CheckpointError(
            f"{path}: {found}, expected {record.size_bytes} bytes with hash {record.xxh3_128}; "
            f"rm {part_receipt_of(folder, '*')} and run again"
        )
    return known


# ---- the last step ----


def remove_strangers(folder: Path, keep: Collection[str]) -> None:
    """Delete what an earlier attempt, with other settings or killed, left in a folder that is being made."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in keep:
            log.info("%s: left by an earlier attempt, removed", path)
            path.unlink()


def copy_other_files(source: Path, destination: Path, skip: Collection[str] = ()) -> list[str]:
    """Copy configuration, tokenizer and the like; returns their names, sorted.

    Args:
        source: A checkpoint in Hub layout.
        destination: The folder that is being made.
        skip: Names that stay behind; weights and the index always do.
    """
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
    names = sorted(
        name for name in paths if name not in skip and not name.endswith((".safetensors", ".safetensors.index.json"))
    )
    for name in names:
        copy_plainly(paths[name], destination / name)
    return names

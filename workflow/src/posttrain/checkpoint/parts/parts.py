"""Files that a step writes itself, and what is known of each.

Beside the folder, `{folder}.parts` holds a description of each file that is finished: what it was made from, its size
and hash, and what the last step must know about it. A file is described after it is on disk under its name, so after a
kill the next attempt keeps every file whose description and content agree and writes the others again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.checkpoint.parts.fill_folder import current_path, keep_right_files, make_files, reopen
from posttrain.checkpoint.staging.file_placement import (
    HashingFile,
    TransferProgress,
    copy_plainly,
    remove_half_written,
)
from posttrain.errors import CheckpointError
from posttrain.store import FileRecord, RelativeName, hash_file, partial_of, read_json, write_atomic, write_json

Notes = Mapping[str, Any]


@dataclass(frozen=True)
class OutputFile:
    """A file of the folder, as a function of what it is made from.

    Args:
        path: Its name in the folder.
        size_bytes: About how large it will be: for progress and the check of free space.
        made_from: Everything that decides its content, as JSON; a change makes it be written again.
        write: Writes it and returns what the last step must know about it, as JSON.
    """

    path: str
    size_bytes: int
    made_from: Mapping[str, Any]
    write: Callable[[HashingFile], Notes]


@dataclass(frozen=True)
class Description:
    """A finished file.

    Args:
        record: Name, size and hash.
        made_from: Digest of `OutputFile.made_from`; empty for a file that was listed and not written.
        notes: What `OutputFile.write` returned.
    """

    record: FileRecord
    made_from: str = ""
    notes: Notes = dataclasses.field(default_factory=dict)


def write_files(folder: Path, files: Sequence[OutputFile], label: str, num_threads: int = 1) -> list[Description]:
    """Make `folder`, partial or finished, hold files; one that an earlier attempt has written stays.

    Args:
        folder: Final name of the folder; it is made partial again before anything in it changes.
        files: What it must hold, among others.
        label: Of the progress bar.
        num_threads: Files written at a time.

    Returns:
        Their descriptions, in order.

    Raises:
        CheckpointError: What they are made from is not what it must be.
        OSError: The disk is too small or became full; what is complete is kept.
    """
    if not folder.exists() or partial_of(folder).exists():
        reopen(folder)
    for path in (current_path(folder), description_path(folder, "").parent):
        remove_half_written(path)
    maker = _Writer(folder)
    known = keep_right_files(maker, current_path(folder), files, label, num_threads)
    if missing := [file for file in files if file.path not in known]:
        known |= make_files(maker, reopen(folder), missing, label, num_threads)
    return [known[file.path] for file in files]


class _Writer:
    """Writes files and describes them; see `fill_folder.Maker`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def check(self, file: OutputFile, folder: Path) -> tuple[Description | None, str]:
        """Compare a file with its description."""
        path = description_path(self._folder, file.path)
        known = read_description(path) if path.exists() else None
        if known is None or known.made_from != digest(file.made_from):
            return None, "made from something else" if known else "not described"
        written = folder / file.path
        is_right = written.stat().st_size == known.record.size_bytes and hash_file(written) == known.record.xxh3_128
        return (known, "") if is_right else (None, "not what its description says")

    def missing_bytes(self, file: OutputFile, folder: Path) -> int:
        """Count the whole file."""
        return file.size_bytes

    def make(self, file: OutputFile, folder: Path, progress: TransferProgress) -> Description:
        """Write a file, then its description."""
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
            record = FileRecord(RelativeName(file.path), output.size_bytes, output.xxh3_128)
            made.append(Description(record, digest(file.made_from), notes))

        write_atomic(folder / file.path, write)
        write_json(description_path(self._folder, file.path), dataclasses.asdict(made[0]))
        return made[0]


def description_path(folder: Path, name: str) -> Path:
    """Return where the description of a file of `folder` is kept."""
    return folder.with_name(f"{folder.name}.parts") / f"{name}.json"


def digest(content: Any) -> str:
    """Return the SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_description(path: Path) -> Description:
    """Read what was written about a finished file.

    Raises:
        CheckpointError: When it is missing or something else.
    """
    try:
        row = read_json(path)
        return Description(FileRecord(**row["record"]), row["made_from"], row["notes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a description ({error}); delete it and run again") from error


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

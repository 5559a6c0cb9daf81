"""Files that a step writes itself, and their descriptions.

`{folder}.parts` holds a description of each finished file: its inputs, size, hash, and notes for the last step. The
description is written after the file has its final name. After a kill, the next attempt keeps each file that matches
its description and writes the others again.
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
    """A file of the folder, with the function that writes it.

    Args:
        path: Name in the folder.
        size_bytes: Approximate size, for progress and the check of free space.
        made_from: Everything that determines the content, as JSON; the file is rewritten if it changes.
        write: Writes the file and returns notes for the last step, as JSON.
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
        made_from: Digest of `OutputFile.made_from`; empty for a listed file.
        notes: Return value of `OutputFile.write`.
    """

    record: FileRecord
    made_from: str = ""
    notes: Notes = dataclasses.field(default_factory=dict)


def write_files(folder: Path, files: Sequence[OutputFile], label: str, num_threads: int = 1) -> list[Description]:
    """Write files into `folder`, partial or finished; files of an earlier attempt are kept.

    Args:
        folder: Final path of the folder; it becomes partial before any change.
        files: Files to write; the folder may hold others.
        label: Label of the progress bar.
        num_threads: Number of files written at a time.

    Returns:
        The descriptions, in order.

    Raises:
        CheckpointError: The inputs are wrong.
        OSError: The disk is too small or full; complete files are kept.
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
    """Writes and describes files; see `fill_folder.Maker`."""

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
        """Return the whole size."""
        return file.size_bytes

    def make(self, file: OutputFile, folder: Path, progress: TransferProgress) -> Description:
        """Write a file, then its description."""
        made: list[Description] = []
        left = file.size_bytes

        def count(written: int) -> None:
            # The announced size covers the tensors, not the header.
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
    """Return the path of a file's description."""
    return folder.with_name(f"{folder.name}.parts") / f"{name}.json"


def digest(content: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_description(path: Path) -> Description:
    """Read the description of a finished file.

    Raises:
        CheckpointError: It is missing or invalid.
    """
    try:
        row = read_json(path)
        return Description(FileRecord(**row["record"]), row["made_from"], row["notes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "description-invalid", f"{path}: not a description ({error}); delete it and run again"
        ) from error


def copy_other_files(source: Path, destination: Path, skip: Collection[str] = ()) -> list[str]:
    """Copy configuration, tokenizer and other small files; return their names, sorted.

    Args:
        source: A checkpoint in Hub layout.
        destination: The folder that is being made.
        skip: Names to omit; weights and the index are never copied.
    """
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
    names = sorted(
        name for name in paths if name not in skip and not name.endswith((".safetensors", ".safetensors.index.json"))
    )
    for name in names:
        copy_plainly(paths[name], destination / name)
    return names

"""The two steps of every folder that several jobs make: independent parts, and the step that joins them.

While it is made, the folder is `{folder}.partial`. A part writes its receipt once its files are present and correct.
The last step compares the receipts of all parts with the expected files and the files on disk, adds the remaining
files, renames the folder and writes its receipt, which does not depend on the number of parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.checkpoint.parts.fill_folder import clear, current_path
from posttrain.checkpoint.parts.parts import (
    Description,
    OutputFile,
    description_path,
    digest,
    read_description,
    write_files,
)
from posttrain.errors import CheckpointError
from posttrain.store import (
    FileRecord,
    Receipt,
    building,
    claim,
    part_receipt_of,
    read_receipt,
    record_files,
    require_files,
    write_receipt,
)

# Options of scripts that make or join parts (`cli.command_line`).
SOURCE = {"source": (Path, "checkpoint in Hub layout"), "source_receipt": (Path, "its receipt")}
FOLDER = {"folder": (Path, "final name of the folder"), "receipt": (Path, "written last")}
PART: dict[str, Any] = {
    **FOLDER,
    "part": (int, "number of this part, from 0"),
    "num_parts": (int, "number of parts"),
    "threads": {"type": int, "default": 1, "help": "files made at a time"},
}
JOIN: dict[str, Any] = {
    **FOLDER,
    "part_receipts": {"type": Path, "nargs": "*", "required": True, "help": "receipts of all parts"},
}

# Options of recodings.
CALIBRATION: dict[str, Any] = {"type": Path, "nargs": "*", "default": [], "help": "files of largest magnitudes"}


class Making(Protocol):
    """The contents of a folder and how to make them."""

    def names(self, num_parts: int) -> Collection[str]:
        """Return the names of the files that all parts make together."""

    def make(self, part: int, num_parts: int, folder: Path, num_threads: int) -> Sequence[Description]:
        """Make a part's share of the files.

        Args:
            part: Index of the share, from 0.
            num_parts: Number of shares.
            folder: Final path of the folder.
            num_threads: Number of files made at a time.

        Raises:
            CheckpointError: An input is wrong; the text names it.
        """

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return the receipt's settings, besides the inputs."""

    def clear(self, partial: Path, keep: Collection[str]) -> None:
        """Remove leftovers from the folder."""

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> Iterable[str]:
        """Check the parts' files, write the remaining files, and return their names.

        Args:
            partial: The folder in progress; it holds the parts' files and nothing else.
            parts: Name -> description of those files.

        Raises:
            CheckpointError: The files do not form a complete folder.
        """


class Written:
    """A `Making` whose parts write their own files."""

    def files(self, part: int, num_parts: int) -> Sequence[OutputFile]:
        """Return a part's share."""
        raise NotImplementedError

    def make(self, part: int, num_parts: int, folder: Path, num_threads: int = 1) -> Sequence[Description]:
        """Write a part's share; see `Making.make`."""
        import torch

        # Files and parts are written in parallel: each thread has one core.
        torch.set_num_threads(1)
        return write_files(folder, self.files(part, num_parts), f"part {part} of {num_parts}", num_threads)

    def clear(self, partial: Path, keep: Collection[str]) -> None:
        """Delete leftovers of an earlier attempt that was killed or had other settings."""
        clear(partial, keep)


def make_part(
    step: str,
    args: argparse.Namespace,
    inputs: Mapping[str, str],
    open_making: Callable[[], Making],
    files: Sequence[Path] = (),
    **identity: Any,
) -> None:
    """Make a part's share of the files unless it is done, and write the part's receipt.

    Args:
        step: Name of the step in receipts.
        args: Parsed options `PART`.
        inputs: Inputs of the folder: name -> digest of the receipt.
        open_making: Constructs the `Making`; called only if there is work to do.
        files: Further inputs of the part; a newer one makes the part again.
        identity: Further settings that distinguish this folder's parts.

    Raises:
        CheckpointError: See `Making.make`.
    """
    started = time.time()
    settings = {"part": args.part, "num_parts": args.num_parts, **identity}
    if claim(args.receipt, Receipt(step, (), inputs, settings), args.folder, files):
        made = open_making().make(args.part, args.num_parts, args.folder, args.threads)
        write_part_receipt(args.receipt, step, made, inputs, settings, started)


def write_part_receipt(
    path: Path,
    step: str,
    made: Sequence[Description],
    inputs: Mapping[str, str],
    settings: Mapping[str, Any],
    started: float,
) -> None:
    """Write the receipt of a finished part."""
    is_described = all(item.made_from for item in made)
    notes = {"notes": digest([item.notes for item in made])} if is_described else {}
    write_receipt(path, Receipt(step, tuple(item.record for item in made), inputs, {**settings, **notes}), started)


def join_parts(
    step: str,
    part_step: str,
    args: argparse.Namespace,
    inputs: Mapping[str, str],
    making: Making,
    **identity: Any,
) -> None:
    """Check the folder against its parts, complete and rename it, and write the receipt.

    Args:
        step: Name of the step in receipts.
        part_step: Name of the step that made the parts.
        args: Parsed options `JOIN`.
        inputs: See `make_part`.
        making: Contents of the folder.
        identity: See `make_part`.

    Raises:
        CheckpointError: A part is missing or has other inputs, or a file has changed.
    """
    names = making.names(len(args.part_receipts))
    parts = read_parts(args.folder, args.part_receipts, Receipt(part_step, (), inputs, identity), names)
    records = tuple(part.record for part in parts.values())

    def make(partial: Path) -> tuple[FileRecord, ...]:
        making.clear(partial, parts)
        small = record_files(partial, making.complete(partial, parts))
        _remove_other_parts(args.folder, args.part_receipts)
        return (*records, *small)

    make_folder(args, Receipt(step, records, inputs, making.settings(parts)), make, parts=args.part_receipts)


def make_folder(
    args: argparse.Namespace,
    wanted: Receipt,
    make: Callable[[Path], tuple[FileRecord, ...]],
    sources: Iterable[Path] = (),
    parts: Iterable[Path] = (),
) -> None:
    """Make a folder unless it exists, rename it, and write its receipt.

    Args:
        args: Options with `folder` and `receipt`.
        wanted: Expected receipt; see `store.claim`.
        make: Fills the partial folder, and returns the records of its files.
        sources: See `store.claim`.
        parts: See `store.claim`.
    """
    started = time.time()
    if claim(args.receipt, wanted, args.folder, sources, parts):
        with building(args.folder) as partial:
            files = make(partial)
        write_receipt(args.receipt, dataclasses.replace(wanted, files=files), started)


def read_parts(
    folder: Path, receipts: Sequence[Path], wanted: Receipt, names: Collection[str]
) -> dict[str, Description]:
    """Read the descriptions of all parts, and check that the folder is complete.

    Args:
        folder: Final path of the folder.
        receipts: The parts' receipts, in any order.
        wanted: Step, inputs and minimum settings that each receipt must have.
        names: Names of the files that all parts together make.

    Returns:
        File name -> description, sorted by name.

    Raises:
        CheckpointError: A part is missing or has other inputs; or a file is missing, belongs to no part or not to the
            folder, or has changed since. Lists all of them.
    """
    read = {path: read_receipt(path) for path in receipts}
    wrong = [f"{path}: {why}" for path, receipt in read.items() if (why := _misfit(receipt, wanted))]
    parts = sorted(receipt.settings.get("part", -1) for receipt in read.values())
    counts = sorted({receipt.settings.get("num_parts", -1) for receipt in read.values()})
    if parts != list(range(len(receipts))) or counts not in ([], [len(receipts)]):
        wrong.append(f"parts {parts} of {counts}, expected each of 0 to {len(receipts) - 1} once")
    made = {record.path: (record, path) for path, receipt in read.items() for record in receipt.files}
    wrong += [f"{name}: in no part" for name in sorted(set(names) - made.keys())]
    wrong += [f"{name}: does not belong there" for name in sorted(made.keys() - set(names))]
    wrong += [why for record, path in made.values() if (why := _change(folder, record, path.stat().st_mtime))]
    described: dict[str, Description] = {}
    for name, (record, path) in sorted(made.items() if not wrong else ()):
        is_described = "notes" in read[path].settings
        described[name] = read_description(description_path(folder, name)) if is_described else Description(record)
        wrong += [f"{name}: not as its part left it"] if described[name].record != record else []
    if wrong:
        raise CheckpointError(
            "parts-do-not-fit",
            f"{folder}: the parts do not fit:\n  " + "\n  ".join(wrong) + f"\n  remedy: rm "
            f"{part_receipt_of(folder, '*')} and run again: only what is wrong is made again",
        )
    return described


def _misfit(receipt: Receipt, wanted: Receipt) -> str:
    if receipt.step != wanted.step:
        return f"made by {receipt.step}, expected {wanted.step}"
    if dict(receipt.inputs) != dict(wanted.inputs):
        return "made from another source"
    return "" if wanted.settings.items() <= receipt.settings.items() else "not a part of this list"


def _change(folder: Path, record: FileRecord, verified_unix: float) -> str:
    """Return how a file has changed since its part verified it; "" if it has not."""
    path = current_path(folder) / record.path
    if not path.is_file():
        return f"{path}: missing, expected {record.size_bytes} bytes"
    status = path.stat()
    if status.st_size != record.size_bytes:
        return f"{path}: {status.st_size} bytes, expected {record.size_bytes} bytes"
    return f"{path}: changed after it was verified" if status.st_mtime > verified_unix else ""


def _remove_other_parts(folder: Path, receipts: Collection[Path]) -> None:
    """Delete receipts of an earlier split, because the number of receipts defines the number of parts."""
    kept = {path.resolve() for path in receipts}
    for path in part_receipt_of(folder, "0").parent.glob("*.receipt.json"):
        if path.resolve() not in kept:
            path.unlink()


def source_of(args: argparse.Namespace, name: str) -> dict[str, str]:
    """Return the digest of the source's receipt under the given name.

    Raises:
        CheckpointError: The source does not match its receipt.
    """
    return {name: require_files(args.source, args.source_receipt).digest}

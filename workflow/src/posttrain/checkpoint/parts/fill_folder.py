"""Fills a folder with files: keeps the correct ones and makes the others.

A `Maker` handles one kind of file: from the Hub or another folder, written by a step, or copied to a node's local disk.
Every byte is read once: hashes are computed while a file is made.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Protocol, TypeVar

from posttrain.checkpoint.staging.file_placement import TransferProgress, require_free_space, run_parallel
from posttrain.errors import CheckpointError
from posttrain.report.progress import ProgressBar
from posttrain.store import partial_of, receipt_of, sync_folder

log = logging.getLogger(__name__)


class Wanted(Protocol):
    """A file that the folder must hold."""

    @property
    def path(self) -> str:
        """Name in the folder."""

    @property
    def size_bytes(self) -> int:
        """Size, possibly approximate."""


File = TypeVar("File", bound=Wanted)
FileIn = TypeVar("FileIn", bound=Wanted, contravariant=True)
Made = TypeVar("Made")
MadeOut = TypeVar("MadeOut", covariant=True)


class Maker(Protocol[FileIn, MadeOut]):
    """Source of files; returns the record of a correct file, or an object that contains it."""

    def check(self, file: FileIn, folder: Path) -> tuple[MadeOut | None, str]:
        """Return the record of a correct file in `folder`, or None and the difference."""

    def missing_bytes(self, file: FileIn, folder: Path) -> int:
        """Return the disk space that the file still needs."""

    def make(self, file: FileIn, folder: Path, progress: TransferProgress) -> MadeOut | None:
        """Place the correct file under its name in `folder`; None if it is wrong and the maker has recorded that."""


def keep_right_files(
    maker: Maker[File, Made], folder: Path, files: Collection[File], label: str, num_workers: int
) -> dict[str, Made]:
    """Return path -> record of the correct files in `folder`; logs the others."""
    present = [file for file in files if (folder / file.path).is_file()]
    if not present:
        return {}
    with ProgressBar(f"verify {label}", sum(file.size_bytes for file in present)) as bar:
        progress = TransferProgress(bar)

        def check(file: File) -> Made | None:
            known, reason = maker.check(file, folder)
            progress.advance(file.size_bytes)
            if known is None:
                log.warning("%s is made again: %s", folder / file.path, reason)
            return known

        found = run_parallel(check, present, num_workers, progress)
    return {file.path: known for file, known in zip(present, found, strict=True) if known is not None}


def make_files(
    maker: Maker[File, Made],
    folder: Path,
    files: Collection[File],
    label: str,
    num_workers: int,
    everything: Collection[File] = (),
) -> dict[str, Made]:
    """Make files in `folder`, several at a time, largest first.

    Args:
        maker: Source of the files.
        folder: Receives each file once it is complete and correct.
        files: Missing or wrong files.
        label: Label of the progress bar.
        num_workers: Number of files made at a time.
        everything: All files of the folder, including those of other jobs; the free space must suffice for all of them.

    Returns:
        Path -> record.

    Raises:
        CheckpointError: The bytes are wrong.
        RuntimeError: The connection fails.
        OSError: The disk is too small or full; complete files are kept.
    """
    lacking = {file.path: file for file in everything if not _seems_there(file, folder)}
    lacking |= {file.path: file for file in files}
    need = sum(maker.missing_bytes(file, folder) for file in lacking.values())
    require_free_space(folder, need, f"the rest of {label}")
    total = sum(file.size_bytes for file in files)
    log.info("%s: %d files of %.3f GB to make", label, len(files), total / 1e9)
    largest_first = sorted(files, key=lambda file: -file.size_bytes)
    with ProgressBar(label, total) as bar:
        progress = TransferProgress(bar)
        made = run_parallel(lambda file: maker.make(file, folder, progress), largest_first, num_workers, progress)
    return {file.path: known for file, known in zip(largest_first, made, strict=True) if known is not None}


def _seems_there(file: Wanted, folder: Path) -> bool:
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size_bytes


# ---- the folder itself ----


def current_path(folder: Path) -> Path:
    """Return the current path of `folder`: the final or the partial one."""
    return folder if folder.exists() else partial_of(folder)


def reopen(folder: Path) -> Path:
    """Return the partial folder, which then holds all files of the final one.

    A folder must not look complete while it is being refilled. Several parts may call this concurrently.

    Raises:
        CheckpointError: The folder is a link; its target belongs to another user.
    """
    partial = partial_of(folder)
    for path in (folder, partial):
        if path.is_symlink():
            raise CheckpointError(
                "link-in-the-way",
                f"{path}: a link to {path.resolve()}, which would be written to\n  remedy: remove the link; a model "
                f"that lies elsewhere is used with set model.source.kind=folder model.source.folder={path.resolve()}: "
                "its files are then linked and verified",
            )
    partial.mkdir(parents=True, exist_ok=True)
    receipt_of(folder).unlink(missing_ok=True)
    sync_folder(partial.parent)
    while folder.exists():
        # Another part may have done it first.
        with contextlib.suppress(FileNotFoundError):
            _move_into(folder, partial)
    sync_folder(partial.parent)
    return partial


def _move_into(folder: Path, partial: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            target = partial / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(folder)


def clear(folder: Path, keep: Collection[str], aside: Path | None = None) -> None:
    """Remove files that do not belong to a folder that is being made.

    Args:
        folder: The partial folder.
        keep: Names of the files to keep.
        aside: Destination of the others; by default they are deleted as leftovers of an earlier attempt.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            # Its files are handled before it.
            if not any(path.iterdir()):
                path.rmdir()
        elif name.as_posix() not in keep:
            log.warning("%s: not needed; %s", path, f"it is now in {aside}" if aside else "removed")
            if aside:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                path.replace(aside / name)
            else:
                path.unlink()

"""How a folder comes to hold files, wherever they are from: what is there and right stays, the rest is made.

A `Maker` knows one kind of file: those of the Hub or of another folder, those that a step writes itself, those that are
copied to a node's own disk. Every byte is read once: hashes are taken while a file is made.
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
    """A file that a folder must hold."""

    @property
    def path(self) -> str:
        """Its name in the folder."""

    @property
    def size_bytes(self) -> int:
        """Its length, or about that."""


File = TypeVar("File", bound=Wanted)
FileIn = TypeVar("FileIn", bound=Wanted, contravariant=True)
Made = TypeVar("Made")
MadeOut = TypeVar("MadeOut", covariant=True)


class Maker(Protocol[FileIn, MadeOut]):
    """Where files come from; what it returns of one that is right, is its record or more."""

    def check(self, file: FileIn, folder: Path) -> tuple[MadeOut | None, str]:
        """Return what is known of a file that lies in `folder` and is right, or None and the reason."""

    def missing_bytes(self, file: FileIn, folder: Path) -> int:
        """Return what making a file will still take of the disk."""

    def make(self, file: FileIn, folder: Path, progress: TransferProgress) -> MadeOut | None:
        """Put a right file under its name in `folder`; None when it is wrong and the maker keeps count of that."""


def keep_right_files(
    maker: Maker[File, Made], folder: Path, files: Collection[File], label: str, num_workers: int
) -> dict[str, Made]:
    """Return path -> what is known of those files that are in `folder` and right; the others are named in the log."""
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
    """Make files in `folder`, several at a time, the largest first.

    Args:
        maker: Where they come from.
        folder: Gets each file when it is complete and right.
        files: Those that are not there, or not right.
        label: Of the progress bar.
        num_workers: Files made at a time.
        everything: What other jobs make in the same folder; the disk must have room for all of it.

    Returns:
        Path -> what is known of the file.

    Raises:
        CheckpointError: The bytes are not what they must be.
        RuntimeError: No connection.
        OSError: The disk is too small or became full; what is complete is kept.
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
    """Return where the files of `folder` are now: under its final name, or under its partial one."""
    return folder if folder.exists() else partial_of(folder)


def reopen(folder: Path) -> Path:
    """Return the partial folder, with everything in it that lies under the final name.

    A folder that is filled again must not claim to be complete. Several parts may do this at the same time.

    Raises:
        CheckpointError: When the folder is a link: what is behind it is somebody else's.
    """
    partial = partial_of(folder)
    for path in (folder, partial):
        if path.is_symlink():
            raise CheckpointError(
                f"{path}: a link to {path.resolve()}, which would be written to\n  remedy: remove the link; a model "
                f"that lies elsewhere is used with set model.source.kind=folder model.source.folder={path.resolve()}: "
                "its files are then linked and verified"
            )
    partial.mkdir(parents=True, exist_ok=True)
    receipt_of(folder).unlink(missing_ok=True)
    sync_folder(partial.parent)
    while folder.exists():
        # Another part may be faster at any point: it is then done.
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
    """Take away what lies in a folder that is being made and does not belong to it.

    Args:
        folder: The partial folder.
        keep: Names of the files that stay.
        aside: Where the others go; by default they are deleted, as they are of an earlier attempt.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            # Its files have been looked at before it.
            if not any(path.iterdir()):
                path.rmdir()
        elif name.as_posix() not in keep:
            log.warning("%s: not needed; %s", path, f"it is now in {aside}" if aside else "removed")
            if aside:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                path.replace(aside / name)
            else:
                path.unlink()

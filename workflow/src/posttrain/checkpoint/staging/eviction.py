"""Frees space on a node's local disk by deleting old copies, by a rule in the config.

Only unchanged files in a `staging_record` are deleted; files that others added or changed stay. A copy in use is never
deleted: processes that stage to it or train from it hold a lock (`flock`) on its folder, which the kernel releases when
the process ends. The folder is on the node's local disk, so every possible user sees the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpoint.staging.staging_record import (
    SUFFIX,
    CopiedFile,
    is_as_left,
    read_staging_record,
    staging_record_of,
)
from posttrain.errors import CheckpointError
from posttrain.readable import format_bytes
from posttrain.store import RelativeName

log = logging.getLogger(__name__)

DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Eviction:
    """The eviction rule.

    Args:
        rule: never, oldest (longest unused first, until the space suffices), or unused (all unused for `unused_days`).
        unused_days: See `rule`.
        root: Folder on the node's local disk with the copies of all models.
    """

    rule: str
    unused_days: float
    root: Path


@dataclass(frozen=True)
class OldCopy:
    """A copy that may be evicted.

    Args:
        folder: Folder of the copy.
        used_unix: Time of the last staging or training from it.
        names: Unchanged files that we wrote.
        links: Links that we made.
        size_bytes: Space that deleting the files frees.
    """

    folder: Path
    used_unix: float
    names: tuple[RelativeName, ...]
    links: tuple[RelativeName, ...]
    size_bytes: int


@contextlib.contextmanager
def in_use(folders: Sequence[Path]) -> Iterator[None]:
    """Protect copies from eviction during the block; several processes may use one copy."""
    with ExitStack() as stack:
        for folder in folders:
            stack.callback(os.close, _hold(folder))
        yield


def make_room(needed_bytes: int, destination: Path, eviction: Eviction) -> None:
    """Delete old copies by the rule; log the deleted ones and the candidates.

    Args:
        needed_bytes: Size of the next write.
        destination: Its destination, on the same disk as the copies.
        eviction: The rule.
    """
    now = time.time()
    for copy in sorted(find_copies(eviction.root), key=lambda copy: copy.used_unix):
        lacks_room = shutil.disk_usage(destination).free < needed_bytes
        days = (now - copy.used_unix) / DAY_SECONDS
        said = f"{copy.folder} ({format_bytes(copy.size_bytes)}, unused for {days:.1f} days)"
        is_due = {"never": False, "oldest": lacks_room, "unused": days >= eviction.unused_days}[eviction.rule]
        if is_due and evict(copy):
            log.warning("evicted %s", said)
        elif lacks_room and not is_due:
            log.info("stage.evict=%s keeps %s", eviction.rule, said)


def find_copies(root: Path) -> list[OldCopy]:
    """Return the copies in `root`, {model}/{revision}/{folder}, that have a staging record."""
    found = []
    for path in sorted(root.glob(f"*/*/*{SUFFIX}")):
        try:
            found.append(_read_copy(path))
        except CheckpointError as error:
            log.warning("%s; its copy is no candidate for eviction", error)
    return found


def evict(copy: OldCopy) -> bool:
    """Delete a copy unless it is in use; return True if it is gone.

    The staging record is deleted last, so that a copy can still be evicted after a kill.
    """
    try:
        descriptor = os.open(copy.folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        staging_record_of(copy.folder).unlink(missing_ok=True)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("%s is in use and stays", copy.folder)
        return False
    else:
        _delete(copy)
        return True
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    """Return a descriptor of `folder`, created if missing, with a shared lock on it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # It was evicted during the wait: the name is gone, or belongs to another folder.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)


def _read_copy(path: Path) -> OldCopy:
    row, folder = read_staging_record(path), path.with_name(path.name.removesuffix(SUFFIX))
    ours = [file for file in row["files"] if file.is_ours and _is_still_ours(file.path.below(folder), file)]
    names = tuple(file.path for file in ours)
    return OldCopy(folder, row["used_unix"], names, tuple(row["links"]), sum(file.size_bytes for file in ours))


def _is_still_ours(path: Path, file: CopiedFile) -> bool:
    # mtime 0 marks a file that a killed staging was about to write.
    was_begun = file.mtime_ns == 0 and path.is_file() and path.stat().st_size == file.size_bytes
    return was_begun or is_as_left(path, file)


def _delete(copy: OldCopy) -> None:
    for name in copy.names:
        name.below(copy.folder).unlink(missing_ok=True)
    for name in copy.links:
        if (link := name.below(copy.folder)).is_symlink():
            link.unlink()
    for parent, _, _ in os.walk(copy.folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)
    if copy.folder.exists():
        log.info("%s stays: it holds files that are not ours", copy.folder)
    staging_record_of(copy.folder).unlink()

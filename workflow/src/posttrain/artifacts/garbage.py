"""What of a shared store nobody uses any more: shown first, deleted only on demand."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts.build_lock import lock_folder_of
from posttrain.artifacts.durable import sync_folder
from posttrain.artifacts.lease import Lease, LeaseHeldError, living_holder
from posttrain.artifacts.paths import partial_of, receipt_of
from posttrain.artifacts.references import SECONDS_PER_DAY, Reference, read_references, references_folder

BESIDE = (".receipt.json", ".history.jsonl", ".manifest.json", ".parts", ".partial", ".lease")


@dataclass(frozen=True)
class Stored:
    """One artefact of a store, finished or half made.

    Args:
        folder: Its final name.
        users: Live references to it.
        builder: Who is making it now; "" when nobody is.
        last_change_unix: When something of it was last written.
        is_finished: It has its receipt.
        is_unused: Nobody uses it, nobody makes it, and it has not changed for the days asked for.
    """

    folder: Path
    users: tuple[Reference, ...]
    builder: str
    last_change_unix: float
    is_finished: bool
    is_unused: bool


def list_store(store: Path, unused_days: float) -> list[Stored]:
    """Return every artefact of a store, sorted by path.

    Args:
        store: Its root.
        unused_days: What changed or was referred to more recently is kept.
    """
    users = defaultdict(list)
    for reference in read_references(store).values():
        if reference.is_live(unused_days):
            for name in reference.artefacts:
                users[store / name].append(reference)
    return [_look_at(folder, users[folder], unused_days) for folder in sorted(_find_folders(store))]


def freed_bytes(artefacts: Iterable[Stored]) -> int:
    """Return the bytes on disk that are free once these are gone; a file with names elsewhere frees none."""
    names: dict[tuple[int, int], list[os.stat_result]] = defaultdict(list)
    for artefact in artefacts:
        for status in _files_of(artefact.folder):
            names[status.st_dev, status.st_ino].append(status)
    return sum(found[0].st_blocks * 512 for found in names.values() if len(found) >= found[0].st_nlink)


def delete_unused(store: Path, unused_days: float) -> list[Stored]:
    """Delete what nobody uses, each artefact after looking again under its locks; returns what is gone.

    First its receipt goes, so that a kill leaves something half made and never something that seems whole.
    """
    gone = [found for found in list_store(store, unused_days) if found.is_unused and _delete(store, found, unused_days)]
    for path, reference in read_references(store).items():
        if not reference.is_live(unused_days):
            path.unlink(missing_ok=True)
    return gone


def _find_folders(store: Path) -> Iterator[Path]:
    """Yield the final names of all artefacts, finished or not, without looking into them."""
    waiting = [store]
    while waiting:
        parent = waiting.pop()
        names = {entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)}
        files = {entry.name for entry in os.scandir(parent) if entry.is_file(follow_symlinks=False)}
        artefacts = {name.removesuffix(ending) for name in names | files for ending in BESIDE if name.endswith(ending)}
        yield from (parent / name for name in artefacts)
        inside = artefacts | {name for name in names if name.endswith(BESIDE)}
        waiting += [parent / name for name in names - inside if parent / name != references_folder(store)]


def _look_at(folder: Path, users: Sequence[Reference], unused_days: float) -> Stored:
    builders = [str(holder) for lock in _locks_of(folder) if (holder := living_holder(lock))]
    beside = [folder, *_beside(folder), *folder.with_name(f"{folder.name}.parts").glob("*")]
    beside += partial_of(folder).rglob("*")
    last_change = max((path.stat().st_mtime for path in beside if path.exists()), default=0.0)
    is_old = time.time() - last_change >= unused_days * SECONDS_PER_DAY
    is_unused = is_old and not users and not builders
    return Stored(folder, tuple(users), "; ".join(builders), last_change, receipt_of(folder).exists(), is_unused)


def _delete(store: Path, found: Stored, unused_days: float) -> bool:
    folder = found.folder
    with contextlib.ExitStack() as locks:
        try:
            for lock in _locks_of(folder):
                locks.enter_context(Lease(folder, lock))
        except LeaseHeldError:
            return False
        references = [reference for reference in read_references(store).values() if reference.is_live(unused_days)]
        if any(store / name == folder for reference in references for name in reference.artefacts):
            return False
        receipt_of(folder).unlink(missing_ok=True)
        sync_folder(folder.parent)
        # The locks go last: until then nobody begins to make it.
        for path in sorted((folder, *_beside(folder)), key=lambda path: path.suffix in (".parts", ".lease")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return True


def _locks_of(folder: Path) -> list[Path]:
    """Return the lock of an artefact and those of its parts."""
    return [lock_folder_of(receipt_of(folder)), *folder.with_name(f"{folder.name}.parts").glob("*.lease")]


def _beside(folder: Path) -> list[Path]:
    return [folder.with_name(folder.name + ending) for ending in BESIDE]


def _files_of(folder: Path) -> Iterator[os.stat_result]:
    for root in (folder, *_beside(folder)):
        for path in [root, *root.rglob("*")]:
            if path.is_file() and not path.is_symlink():
                yield path.stat()

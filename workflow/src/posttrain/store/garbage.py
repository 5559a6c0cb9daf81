"""Garbage of a shared store: listed first, deleted only on request.

Only artefacts of our steps are considered: those with a receipt, a lease, or parts with one of these. A folder that a
user put into the store has none of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import CheckpointError
from posttrain.store.build_lock import lock_folder_of
from posttrain.store.durable import sync_folder
from posttrain.store.group_permissions import shared
from posttrain.store.lease import Lease, LeaseHeldError, living_holder
from posttrain.store.paths import manifest_of, part_receipt_of, partial_of, receipt_of
from posttrain.store.plain_json import read_json
from posttrain.store.references import SECONDS_PER_DAY, Reference, read_references, references_folder

log = logging.getLogger(__name__)

# Name of a receipt whose artefact is being deleted.
ASIDE = ".receipt.deleted"
BESIDE = (".receipt.json", ".history.jsonl", ".manifest.json", ".parts", ".partial", ".lease", ASIDE)


@dataclass(frozen=True)
class Stored:
    """One artefact of a store, finished or unfinished.

    Args:
        folder: Its final path.
        users: Live references to it.
        builder: The process that is making it; "" if none.
        last_change_unix: Time of the last write to it.
        is_finished: It has a receipt.
        is_unused: It has no users and no builder, and has not changed for the given number of days.
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
        store: Root of the store.
        unused_days: Artefacts that changed or were referenced more recently are kept.
    """
    users = defaultdict(list)
    for reference in read_references(store).values():
        if reference.is_live(unused_days):
            for name in reference.artefacts:
                users[store / name].append(reference)
    return [_look_at(folder, tuple(users[folder]), unused_days) for folder in sorted(_find_folders(store))]


def freed_bytes(artefacts: Iterable[Stored]) -> int:
    """Return the bytes that deleting these artefacts frees; a file with hard links elsewhere frees none."""
    names: dict[tuple[int, int], list[os.stat_result]] = defaultdict(list)
    for artefact in artefacts:
        for status in _files_of(artefact.folder):
            names[status.st_dev, status.st_ino].append(status)
    return sum(found[0].st_blocks * 512 for found in names.values() if len(found) >= found[0].st_nlink)


def delete_unused(store: Path, unused_days: float) -> tuple[list[Stored], list[str]]:
    """Delete unused artefacts, after checking each again under its locks.

    The receipt is deleted first, so that a kill leaves an unfinished artefact and never one that seems complete.

    Returns:
        The deleted artefacts, and a line for each error; an error does not stop the other deletions.
    """
    gone, errors = [], []
    for found in list_store(store, unused_days):
        try:
            if found.is_unused and _delete(store, found.folder, unused_days):
                gone.append(found)
        except (OSError, CheckpointError) as error:
            errors.append(f"{found.folder}: {error}")
    for path, reference in read_references(store).items():
        if not reference.is_live(unused_days):
            path.unlink(missing_ok=True)
    return gone, errors


def _find_folders(store: Path) -> Iterator[Path]:
    """Yield the final paths of all artefacts, finished or not, without searching inside them."""
    waiting = [store]
    while waiting:
        parent = waiting.pop()
        try:
            entries = list(os.scandir(parent))
        except PermissionError as error:
            log.warning("not looked into: %s", error)
            continue
        names = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        stems = {name.removesuffix(ending) for name in names | files for ending in BESIDE if name.endswith(ending)}
        artefacts = {stem for stem in stems if _is_ours(parent / stem)}
        yield from (parent / name for name in artefacts)
        inside = artefacts | {name for name in names if name.endswith(BESIDE)}
        waiting += [parent / name for name in names - inside if parent / name != references_folder(store)]


def _is_ours(folder: Path) -> bool:
    """Return whether one of our steps made an artefact or began to; every step holds the artefact's lease meanwhile."""
    try:
        own, *of_parts = _locks_of(folder)
        # A listed folder is the user's own until one of its parts is downloaded.
        locks = of_parts if folder.exists() and manifest_of(folder).exists() else [own, *of_parts]
    except PermissionError as error:
        log.warning("not looked at: %s", error)
        return False
    receipts = [receipt_of(folder), *part_receipt_of(folder, "").parent.glob("*.receipt.json")]
    return any(any(lock.glob("epoch-*.json")) for lock in locks) or any(map(_is_receipt, receipts))


def _is_receipt(path: Path) -> bool:
    """Return whether this is a receipt of any version of posttrain, whether or not its digest matches."""
    try:
        row = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and {"step", "format_version", "files", "digest"} <= row.keys()


def _look_at(folder: Path, users: tuple[Reference, ...], unused_days: float) -> Stored:
    try:
        return _look_into(folder, users, unused_days)
    except (OSError, CheckpointError) as error:
        log.warning("%s stays: %s", folder, error)
        return Stored(folder, users, "", time.time(), is_finished=False, is_unused=False)


def _look_into(folder: Path, users: tuple[Reference, ...], unused_days: float) -> Stored:
    builders = [str(holder) for lock in _locks_of(folder) if (holder := living_holder(lock))]
    beside = [folder, *_beside(folder), *folder.with_name(f"{folder.name}.parts").glob("*")]
    beside += partial_of(folder).rglob("*")
    last_change = max((path.stat().st_mtime for path in beside if path.exists()), default=0.0)
    is_old = time.time() - last_change >= unused_days * SECONDS_PER_DAY
    is_unused = is_old and not users and not builders
    return Stored(folder, users, "; ".join(builders), last_change, receipt_of(folder).exists(), is_unused)


def _delete(store: Path, folder: Path, unused_days: float) -> bool:
    receipt, aside = receipt_of(folder), folder.with_name(f"{folder.name}{ASIDE}")
    with shared(folder), contextlib.ExitStack() as locks:
        try:
            for lock in _locks_of(folder):
                locks.enter_context(Lease(folder, lock))
        except LeaseHeldError:
            return False
        if _is_used(store, folder, unused_days):
            return False
        with contextlib.suppress(FileNotFoundError):
            receipt.rename(aside)
        sync_folder(folder.parent)
        # A run that registered its references meanwhile may have seen the receipt; a later one cannot.
        if _is_used(store, folder, unused_days):
            with contextlib.suppress(FileNotFoundError):
                aside.rename(receipt)
            return False
        # Delete the locks last, so that nobody begins to make the artefact before.
        for path in sorted((folder, *_beside(folder)), key=lambda path: path.suffix in (".parts", ".lease")):
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    return True


def _is_used(store: Path, folder: Path, unused_days: float) -> bool:
    references = [reference for reference in read_references(store).values() if reference.is_live(unused_days)]
    return any(store / name == folder for reference in references for name in reference.artefacts)


def _locks_of(folder: Path) -> list[Path]:
    """Return the lock of an artefact and those of its parts."""
    parts = part_receipt_of(folder, "").parent
    names = sorted(os.listdir(parts)) if parts.is_dir() else []
    return [lock_folder_of(receipt_of(folder)), *(parts / name for name in names if name.endswith(".lease"))]


def _beside(folder: Path) -> list[Path]:
    return [folder.with_name(folder.name + ending) for ending in BESIDE]


def _files_of(folder: Path) -> Iterator[os.stat_result]:
    for root in (folder, *_beside(folder)):
        for path in [root, *root.rglob("*")] if not root.is_symlink() else []:
            if path.is_file() and not path.is_symlink():
                yield path.stat()

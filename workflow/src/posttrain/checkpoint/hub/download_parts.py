"""A checkpoint that several jobs bring into one folder: each its share of the list, then one that joins them.

While it is made, the folder is `{folder}.partial`. A part writes its receipt when its files are there and right; the
last step holds the parts' receipts against the list and against the files, and gives the folder its name. What it says
does not depend on the number of parts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts import (
    FileRecord,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
    sync_folder,
)
from posttrain.checkpoint.hub.client import FetchOptions, fetch_files
from posttrain.checkpoint.hub.listed_files import Manifest
from posttrain.checkpoint.hub.listing import HubSource
from posttrain.checkpoint.hub.local_folder import place_files
from posttrain.checkpoint.hub.transfer import STAGING
from posttrain.errors import CheckpointError

log = logging.getLogger(__name__)
PART_STEP = "download_hf_checkpoint"


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
                f"{path}: a link to {path.resolve()}, which would be written to\n  remedy: remove the link and set "
                f"model.source.kind=folder model.source.folder={path.resolve()}: its files are then linked and verified"
            )
    partial.mkdir(parents=True, exist_ok=True)
    receipt_of(folder).unlink(missing_ok=True)
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


def bring_part(
    manifest: Manifest, part: int, num_parts: int, folder: Path, options: FetchOptions
) -> tuple[FileRecord, ...]:
    """Bring a part's share of the files from the Hub or from a folder; see `hub.download` and `place_files`."""
    share = manifest.share(part, num_parts)
    if manifest.source["kind"] == "folder":
        return place_files(Path(manifest.source["folder"]), folder, share, options.num_workers)
    source = HubSource(manifest.source["repo_id"], manifest.source["revision"])
    return fetch_files(source, folder, share, manifest, options)


def origin_of(manifest: Manifest) -> tuple[dict[str, str], dict[str, Any]]:
    """Return inputs and settings of the receipts of a download: the step that made the source, or commit and list."""
    source = manifest.source
    if digest := source.get("receipt"):
        return {"source": digest}, {}
    if "repo_id" not in source:
        return {}, {}
    return {}, {"repo_id": source["repo_id"], "revision": source["revision"], "manifest": manifest.digest}


# ---- the last step ----


def join_parts(folder: Path, receipts: Sequence[Path], manifest: Manifest) -> tuple[FileRecord, ...]:
    """Return the records of all files, after holding the parts against the list and the files.

    Args:
        folder: Final name of the folder.
        receipts: Of all parts.
        manifest: What the folder must hold.

    Raises:
        CheckpointError: Manifest what no part has brought, and what is missing or has changed since.
    """
    parts = [(path, read_receipt(path)) for path in receipts]
    listed = {file.path: file for file in manifest.files}
    found: dict[str, FileRecord] = {}
    wrong: list[str] = []
    for path, receipt in parts:
        if receipt.step != PART_STEP or receipt.settings.get("manifest") != manifest.digest:
            wrong.append(f"{path}: not a part of this list")
        written = path.stat().st_mtime
        wrong += [line for record in receipt.files if (line := _change(folder, record, written))]
        found |= {record.path: record for record in receipt.files}
    wrong += [f"{name}: in no part" for name in sorted(listed.keys() - found.keys())]
    wrong += [f"{name}: not listed" for name in sorted(found.keys() - listed.keys())]
    if wrong:
        raise CheckpointError(
            f"{folder}: the parts do not fit:\n  " + "\n  ".join(wrong) + f"\n  remedy: rm "
            f"{part_receipt_of(folder, '*')} and run again: only what is wrong is fetched"
        )
    return tuple(found[name] for name in sorted(found))


def _change(folder: Path, record: FileRecord, verified_unix: float) -> str:
    """Tell what happened to a file since its part verified it, "" when nothing did."""
    path = (folder if folder.exists() else partial_of(folder)) / record.path
    if not path.is_file():
        return f"{path}: missing"
    status = path.stat()
    if status.st_size != record.size_bytes:
        return f"{path}: {status.st_size} bytes, {record.size_bytes} expected"
    return f"{path}: changed after it was verified" if status.st_mtime > verified_unix else ""


def set_aside(folder: Path, aside: Path, keep: Collection[str]) -> None:
    """Remove what a transfer left, and move all other files that are not listed out of the way, to `aside`."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.as_posix() not in keep:
            log.warning("%s: not needed; it is now in %s", path, aside)
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, aside / name)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def remove_other_parts(folder: Path, receipts: Collection[Path]) -> None:
    """Delete receipts of an earlier split: the number of those that are there is the number of parts."""
    kept = {path.resolve() for path in receipts}
    for path in part_receipt_of(folder, "0").parent.glob("*.receipt.json"):
        if path.resolve() not in kept:
            path.unlink()

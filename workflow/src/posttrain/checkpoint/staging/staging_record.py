"""Records of the files on a node's disk: one next to each copy, and one per run and node.

The staging record of a copy, `{folder}.testimony.json` on the node's local disk, lists the files with their sizes,
modification times and the boot id of the machine when their content was verified. While all of these match, a file is
trusted without being read. The record also lists the files that we wrote and the time of last use, for `eviction`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError
from posttrain.store import RelativeName, read_json, write_json
from posttrain.store.processes import BOOT_ID

# The original suffix, kept so that copies of older versions are found.
SUFFIX = ".testimony.json"


@dataclass(frozen=True)
class CopiedFile:
    """One file of a copy.

    Args:
        path: Relative to the copy's folder; validated on construction.
        size_bytes: File size.
        xxh3_128: Hash of its content.
        mtime_ns: Its modification time when the content was verified; 0 while it is being copied.
        is_ours: Whether we wrote it and may delete it.
    """

    path: RelativeName
    size_bytes: int
    xxh3_128: str
    mtime_ns: int
    is_ours: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", RelativeName(self.path))


@dataclass(frozen=True)
class StagedCopy:
    """A node's copy of one origin.

    Args:
        source: The origin's folder.
        folder: The copy's folder; equal to `source` if the origin is on the node already.
        receipt_digest: Digest of the origin's receipt.
        files: Every file in the copy, with its verification data.
        links: Names of links to the origin's files, which this node does not need.
        bytes_copied: Bytes written by this staging.
        bytes_kept: Bytes that were present and correct.
    """

    source: str
    folder: str
    receipt_digest: str
    files: tuple[CopiedFile, ...]
    links: tuple[str, ...]
    bytes_copied: int
    bytes_kept: int


def staging_record_of(folder: Path) -> Path:
    """Return the path of a copy's staging record, next to the copy."""
    return folder.with_name(folder.name + SUFFIX)


def write_staging_record(copy: StagedCopy) -> None:
    """Write the staging record of a copy, with the current time."""
    row = {"boot_id": read_boot_id(), "used_unix": time.time(), **dataclasses.asdict(copy)}
    write_json(staging_record_of(Path(copy.folder)), row)


def read_staging_record(path: Path) -> dict[str, Any]:
    """Read a file written by `write_staging_record`.

    Raises:
        CheckpointError: It is missing or invalid.
    """
    try:
        row = read_json(path)
        row["files"] = [CopiedFile(**file) for file in row["files"]]
        row["links"] = [RelativeName(name) for name in row["links"]]
        _ = row["boot_id"], row["used_unix"]
    except FileNotFoundError as error:
        raise CheckpointError(
            "staging-unfinished", f"{path}: missing; staging to this node has not finished"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "staging-record-invalid", f"{path}: not a staging record ({error!r}); delete it and stage again"
        ) from error
    return row


def known_files(folder: Path) -> dict[str, CopiedFile]:
    """Return path -> file from the copy's staging record; empty without a record."""
    path = staging_record_of(folder)
    return {file.path: file for file in read_staging_record(path)["files"]} if path.exists() else {}


def vouched_files(folder: Path) -> dict[Path, str]:
    """Return the files whose hash is known without reading: same boot id, size and modification time."""
    path = staging_record_of(folder)
    if not path.exists() or (row := read_staging_record(path))["boot_id"] != read_boot_id():
        return {}
    return {folder / file.path: file.xxh3_128 for file in row["files"] if is_as_left(folder / file.path, file)}


def is_as_left(path: Path, file: CopiedFile) -> bool:
    """Return whether a file is unchanged since its content was verified."""
    if not path.is_file() or path.is_symlink():
        return False
    status = path.stat()
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def write_node_record(path: Path, node: str, destination: Path, copies: Collection[StagedCopy]) -> None:
    """Write a run's record of a node's copies.

    Args:
        path: The file; its existence means that staging to the node is done.
        node: Name of the node.
        destination: The folder of the copies.
        copies: Result of `node_local.stage`.
    """
    row = {
        "node": node,
        "folder": str(destination),
        "boot_id": read_boot_id(),
        "bytes_copied": sum(copy.bytes_copied for copy in copies),
        "bytes_kept": sum(copy.bytes_kept for copy in copies),
        "copies": [dataclasses.asdict(copy) for copy in copies],
    }
    write_json(path, row)


def read_boot_id() -> str:
    """Return the machine's boot id."""
    return BOOT_ID.read_text(encoding="ascii").strip()

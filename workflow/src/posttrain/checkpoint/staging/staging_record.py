"""What a node's disk is known to hold: a record beside each copy, and one per run of what its nodes hold.

The staging record of a copy, `{folder}.testimony.json` on the node's own disk, lists the files with their sizes, their
modification times and the start of the machine in which their content was verified. While all of these agree, a file is
believed to be right without being read. It also says which files we wrote and when the copy was last used: that is what
`eviction` goes by.
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

# As it was called first: copies that older versions made are found by it.
SUFFIX = ".testimony.json"


@dataclass(frozen=True)
class CopiedFile:
    """One file of a copy.

    Args:
        path: Inside the copy's folder; whatever text is given is checked.
        size_bytes: Its length.
        xxh3_128: Hash of its content.
        mtime_ns: Its modification time when its content was verified; 0 while it is being copied.
        is_ours: We wrote it, so we may delete it.
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
    """What a node holds of one origin.

    Args:
        source: The origin's folder.
        folder: The copy's folder; the same where the origin lies on the node already.
        receipt_digest: Of the origin's receipt.
        files: Every file that lies here, with what vouches for it.
        links: Names of files that are links to the origin's, because nobody here needs them.
        bytes_copied: Written by this staging.
        bytes_kept: Found there and right.
    """

    source: str
    folder: str
    receipt_digest: str
    files: tuple[CopiedFile, ...]
    links: tuple[str, ...]
    bytes_copied: int
    bytes_kept: int


def staging_record_of(folder: Path) -> Path:
    """Return the staging record that stands beside a copy."""
    return folder.with_name(folder.name + SUFFIX)


def write_staging_record(copy: StagedCopy) -> None:
    """Write what a copy holds, as of now, beside it."""
    row = {"boot_id": read_boot_id(), "used_unix": time.time(), **dataclasses.asdict(copy)}
    write_json(staging_record_of(Path(copy.folder)), row)


def read_staging_record(path: Path) -> dict[str, Any]:
    """Read what `write_staging_record` wrote.

    Raises:
        CheckpointError: When it is missing or not a staging record.
    """
    try:
        row = read_json(path)
        row["files"] = [CopiedFile(**file) for file in row["files"]]
        row["links"] = [RelativeName(name) for name in row["links"]]
        _ = row["boot_id"], row["used_unix"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; staging to this node has not finished") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a staging record ({error!r}); delete it and stage again") from error
    return row


def known_files(folder: Path) -> dict[str, CopiedFile]:
    """Return path -> file of the copy's staging record; empty where there is none."""
    path = staging_record_of(folder)
    return {file.path: file for file in read_staging_record(path)["files"]} if path.exists() else {}


def vouched_files(folder: Path) -> dict[Path, str]:
    """Return the files whose hash is known without reading: same start of the machine, same size, same time."""
    path = staging_record_of(folder)
    if not path.exists() or (row := read_staging_record(path))["boot_id"] != read_boot_id():
        return {}
    return {folder / file.path: file.xxh3_128 for file in row["files"] if is_as_left(folder / file.path, file)}


def is_as_left(path: Path, file: CopiedFile) -> bool:
    """Return whether nobody has touched a file since its content was verified."""
    if not path.is_file() or path.is_symlink():
        return False
    status = path.stat()
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def write_node_record(path: Path, node: str, destination: Path, copies: Collection[StagedCopy]) -> None:
    """Write a run's record of what a node holds.

    Args:
        path: The file; its existence means that staging to the node is done.
        node: Name of the node.
        destination: The folder of the copies.
        copies: What `node_local.stage` returned.
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
    """Return the id of this start of the machine."""
    return BOOT_ID.read_text(encoding="ascii").strip()

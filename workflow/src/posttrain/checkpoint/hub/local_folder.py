"""Checkpoint files from a local folder: hard links where possible, otherwise copies; every file is read.

The folder is never written to. The files of a workflow download are compared with its Hub list; the files of a workflow
step, with the step's receipt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from posttrain.checkpoint.hub.client import is_needed
from posttrain.checkpoint.hub.listed_files import ListedFile, Manifest, read_manifest, verify_file
from posttrain.checkpoint.parts.fill_folder import keep_right_files, make_files
from posttrain.checkpoint.staging.file_placement import (
    TransferProgress,
    copy_file,
    hard_link,
    remove_half_written,
)
from posttrain.errors import CheckpointError, ConfigError, Problem
from posttrain.store import FileRecord, Receipt, RelativeName, hash_file, manifest_of

log = logging.getLogger(__name__)
KEY = "model.source.folder"


def list_folder(origin: Path, receipt: Receipt | None = None) -> Manifest:
    """List the needed files of a folder, with the hashes of its Hub list or receipt.

    Args:
        origin: Folder in Hub layout.
        receipt: Receipt of the step that made it.

    Raises:
        ConfigError: The folder does not exist or has no needed files.
        CheckpointError: A file in the Hub's list or the receipt is missing or has another size.
    """
    if not origin.is_dir():
        allowed = "a folder with a checkpoint in Hub layout"
        raise ConfigError(
            [Problem("no-such-checkpoint", KEY, str(origin), allowed, "check the path and that it is mounted here")]
        )
    names = (path.relative_to(origin).as_posix() for path in sorted(origin.rglob("*")) if path.is_file())
    found = {
        name: ListedFile(RelativeName(name, origin), (origin / name).stat().st_size)
        for name in names
        if is_needed(name)
    }
    if not found:
        allowed = "config.json, tokenizer and *.safetensors"
        raise ConfigError(
            [Problem("no-checkpoint-files", KEY, str(origin), allowed, "give the folder that holds them directly")]
        )
    source = {"kind": "folder", "folder": str(origin)}
    if receipt:
        known = [ListedFile(r.path, r.size_bytes, r.sha256, xxh3_128=r.xxh3_128) for r in receipt.files]
        return _vouched(origin, found, known, {**source, "receipt": receipt.digest}, "its receipt")
    if manifest_of(origin).exists():
        manifest = read_manifest(manifest_of(origin))
        return _vouched(origin, found, manifest.files, {**manifest.source, **source}, str(manifest_of(origin)))
    log.info("%s: nobody vouches for its bytes; their hashes are recorded", origin)
    return _vouched(origin, found, found.values(), source, "")


def _vouched(
    origin: Path, found: dict[str, ListedFile], known: Collection[ListedFile], source: dict[str, str], witness: str
) -> Manifest:
    needed = sorted((file for file in known if is_needed(file.path)), key=lambda file: file.path)
    wrong = [
        f"{origin / file.path}: {f'{there.size_bytes} bytes' if there else 'missing'}, {file.size_bytes} expected"
        for file in needed
        if (there := found.get(file.path)) is None or there.size_bytes != file.size_bytes
    ]
    if wrong:
        raise CheckpointError("origin-differs", f"{origin} is not what {witness} says:\n  " + "\n  ".join(wrong))
    return Manifest(source, tuple(needed))


def place_files(origin: Path, folder: Path, files: Collection[ListedFile], num_workers: int) -> tuple[FileRecord, ...]:
    """Hard-link listed files of a local checkpoint into `folder`, or copy them from another file system.

    Args:
        origin: Folder in Hub layout; never written to.
        folder: The partial folder; correct files in it are kept.
        files: Files to place.
        num_workers: Number of files processed at a time.

    Returns:
        One record per file, in the order of `files`.

    Raises:
        CheckpointError: Files differ from the list; names each one.
        OSError: The disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_half_written(folder)
    local = LocalFiles(origin)
    records = keep_right_files(local, folder, files, origin.name, num_workers)
    if missing := [file for file in files if file.path not in records]:
        records |= make_files(local, folder, missing, origin.name, num_workers)
    if local.wrong:
        raise CheckpointError(
            "origin-differs", f"{origin} is not what is listed:\n  " + "\n  ".join(sorted(local.wrong))
        )
    return tuple(records[file.path] for file in files)


class LocalFiles:
    """Files of a folder; see `fill_folder.Maker`.

    Args:
        origin: Source folder.

    Attributes:
        wrong: One line for each placed file that differs from the list.
    """

    def __init__(self, origin: Path):
        self._origin = origin
        self.wrong: list[str] = []

    def check(self, file: ListedFile, folder: Path) -> tuple[FileRecord | None, str]:
        """Accept a link to the original, or a copy with the same content."""
        source, target = self._origin / file.path, folder / file.path
        record, reason = verify_file(target, file)
        is_original = target.samefile(source) or (record and hash_file(source) == record.xxh3_128)
        return (record, reason) if is_original else (None, reason or f"differs from {source}")

    def missing_bytes(self, file: ListedFile, folder: Path) -> int:
        """Return the size of a copy; a link needs no space."""
        same_disk = (self._origin / file.path).stat().st_dev == folder.stat().st_dev
        return 0 if same_disk else file.size_bytes

    def make(self, file: ListedFile, folder: Path, progress: TransferProgress) -> FileRecord | None:
        """Link or copy a file, and hash it; None if it differs from the list."""
        source, target = self._origin / file.path, file.path.below(folder)
        if hard_link(source, target):
            record, reason = verify_file(target, file)
            progress.advance(file.size_bytes)
        else:
            copied = copy_file(source, target, progress)
            record, reason = verify_file(target, file)
            if record and record.xxh3_128 != copied:
                reason = f"its copy has xxh3_128 {record.xxh3_128}, it has {copied}"
                record = None
        if record is None:
            self.wrong.append(f"{source}: {reason}")
            target.unlink()
        return record

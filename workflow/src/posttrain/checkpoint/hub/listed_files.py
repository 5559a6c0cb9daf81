"""The list of a checkpoint's files, and the hashes that identify each file.

The list is made once, from the Hub's metadata of a commit or from a local folder, and shared by the download jobs. A
file with the listed content is kept, whatever wrote it; all others are fetched. Every byte is read once: hashes are
computed while it arrives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from posttrain.checkpoint.staging.file_placement import git_blob_hash
from posttrain.errors import CheckpointError
from posttrain.store import HASH_CHUNK_BYTES, FileRecord, RelativeName, read_json, write_json
from posttrain.store.names import check_digest


@dataclass(frozen=True)
class ListedFile:
    """One file with its size and hashes.

    Args:
        path: Relative to the folder, separated by "/"; validated on construction.
        size_bytes: File size.
        sha256: Hash of a file in LFS or Xet storage; empty for a file in Git itself.
        git_blob: Git's blob id of a file in Git itself; empty otherwise.
        xxh3_128: Hash in the receipt of the step that made it; empty without a receipt.
    """

    path: RelativeName
    size_bytes: int
    sha256: str = ""
    git_blob: str = ""
    xxh3_128: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", RelativeName(self.path))
        for text, num_digits in ((self.sha256, 64), (self.git_blob, 40), (self.xxh3_128, 32)):
            check_digest(text, num_digits)

    @property
    def content_id(self) -> str:
        """Hash that identifies the content; empty if only the size is known."""
        return self.sha256 or self.git_blob or self.xxh3_128


@dataclass(frozen=True)
class Manifest:
    """The files that a checkpoint's folder must hold.

    Args:
        source: Origin of the list, as JSON: kind, repository and commit, or folder.
        files: Sorted by path.
    """

    source: Mapping[str, str]
    files: tuple[ListedFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the files' names, sizes and hashes, independent of the source."""
        rows = [dataclasses.asdict(file) for file in self.files]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def share(self, part: int, num_parts: int) -> list[ListedFile]:
        """Return one part's files; all parts have about equal bytes."""
        largest_first = sorted(self.files, key=lambda file: (-file.size_bytes, file.path))
        return largest_first[part::num_parts]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a list next to the folder that it describes."""
    write_json(path, {"source": dict(manifest.source), "files": [dataclasses.asdict(file) for file in manifest.files]})


def read_manifest(path: Path) -> Manifest:
    """Read a file written by `write_manifest`.

    Raises:
        CheckpointError: It is missing or invalid.
    """
    try:
        row = read_json(path)
        return Manifest(dict(row["source"]), tuple(ListedFile(**file) for file in row["files"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "manifest-invalid", f"{path}: not a list of files ({error}); delete it and run again online"
        ) from error


class ContentHashes:
    """Incremental hashes of a file, and the comparison with the list.

    Args:
        file: The listed file.
    """

    def __init__(self, file: ListedFile):
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Reset to the empty file."""
        file = self._file
        self._ours = xxhash.xxh3_128()
        self._theirs = git_blob_hash(file.size_bytes) if file.git_blob else hashlib.sha256() if file.sha256 else None
        self.size_bytes = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Add the next bytes."""
        self.size_bytes += len(chunk)
        self._ours.update(chunk)
        if self._theirs:
            self._theirs.update(chunk)

    def misfit(self) -> str:
        """Return how the bytes differ from the listed file; "" if they match."""
        file, ours = self._file, self._ours.hexdigest()
        theirs = self._theirs.hexdigest() if self._theirs else ""
        if self.size_bytes != file.size_bytes:
            return f"{self.size_bytes} bytes, {file.size_bytes} are listed"
        if theirs != (file.sha256 or file.git_blob):
            kind = "SHA-256" if file.sha256 else "Git blob id"
            return f"{kind} {theirs}, {file.sha256 or file.git_blob} is listed"
        if file.xxh3_128 not in ("", ours):
            return f"xxh3_128 {ours}, {file.xxh3_128} is listed"
        return ""

    def record(self) -> FileRecord:
        """Return the file's record for a receipt."""
        return FileRecord(self._file.path, self.size_bytes, self._ours.hexdigest(), self._file.sha256)


def verify_file(path: Path, file: ListedFile) -> tuple[FileRecord | None, str]:
    """Return the record of a file that matches the list, or None and the difference."""
    size = path.stat().st_size
    if size != file.size_bytes:
        return None, f"{size} bytes, {file.size_bytes} are listed"
    hashes = ContentHashes(file)
    with open(path, "rb", buffering=0) as content:
        while chunk := content.read(HASH_CHUNK_BYTES):
            hashes.update(chunk)
    reason = hashes.misfit()
    return (None, reason) if reason else (hashes.record(), "")

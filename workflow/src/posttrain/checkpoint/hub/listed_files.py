"""Files that must be what a list says: the list, and the hashes by which a file is known.

The list is made once (what the Hub says about a commit, or what a local folder holds) and shared by the jobs that
each bring a part of it. A file keeps its place when it is right, whoever put it there; all others are brought from
their origin. Every byte is read once: hashes are taken while it arrives.
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
    """One file, with what is known of its content.

    Args:
        path: Inside the folder, with "/"; whatever text is given is checked.
        size_bytes: Its length.
        sha256: Hash of a file in LFS or Xet storage; empty for a file that Git holds itself.
        git_blob: Git's id of the content, for a file that Git holds itself; empty otherwise.
        xxh3_128: Hash by the receipt of the step that made it; empty where there is none.
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
        """What tells this content from any other; empty when only the size is known."""
        return self.sha256 or self.git_blob or self.xxh3_128


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder must hold.

    Args:
        source: Where the list is from, as JSON: kind, repository and commit, or folder.
        files: Sorted by path.
    """

    source: Mapping[str, str]
    files: tuple[ListedFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the files' names, sizes and hashes; where they are from does not count."""
        rows = [dataclasses.asdict(file) for file in self.files]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def share(self, part: int, num_parts: int) -> list[ListedFile]:
        """Return one part's files: about as many bytes as in every other part."""
        largest_first = sorted(self.files, key=lambda file: (-file.size_bytes, file.path))
        return largest_first[part::num_parts]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Keep a list beside the folder that it is about."""
    write_json(path, {"source": dict(manifest.source), "files": [dataclasses.asdict(file) for file in manifest.files]})


def read_manifest(path: Path) -> Manifest:
    """Read what `write_manifest` wrote.

    Raises:
        CheckpointError: When it is missing or something else.
    """
    try:
        row = read_json(path)
        return Manifest(dict(row["source"]), tuple(ListedFile(**file) for file in row["files"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a list of files ({error}); delete it and run again online") from error


class ContentHashes:
    """The hashes of a file that is read or received piece by piece, and whether it is the file that is listed.

    Args:
        file: What it should be.
    """

    def __init__(self, file: ListedFile):
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Forget every byte."""
        file = self._file
        self._ours = xxhash.xxh3_128()
        self._theirs = git_blob_hash(file.size_bytes) if file.git_blob else hashlib.sha256() if file.sha256 else None
        self.size_bytes = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        self.size_bytes += len(chunk)
        self._ours.update(chunk)
        if self._theirs:
            self._theirs.update(chunk)

    def misfit(self) -> str:
        """Return why this is not the listed file; "" when it is."""
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
        """Return the file's line in a receipt."""
        return FileRecord(self._file.path, self.size_bytes, self._ours.hexdigest(), self._file.sha256)


def verify_file(path: Path, file: ListedFile) -> tuple[FileRecord | None, str]:
    """Return the record of a file that is what is listed, or None and the reason why it is not."""
    size = path.stat().st_size
    if size != file.size_bytes:
        return None, f"{size} bytes, {file.size_bytes} are listed"
    hashes = ContentHashes(file)
    with open(path, "rb", buffering=0) as content:
        while chunk := content.read(HASH_CHUNK_BYTES):
            hashes.update(chunk)
    reason = hashes.misfit()
    return (None, reason) if reason else (hashes.record(), "")

"""Places files: hashing during the copy, free space, several files at a time, uniform errors.

All functions process files of any size with constant memory, and leave either the old file or the complete new one
under a name (`store.write_atomic`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import xxhash

from posttrain.errors import lacks_inodes
from posttrain.report.progress import ProgressBar
from posttrain.store import place_atomic, write_atomic
from posttrain.store.durable import naming, remove_dead_temporaries

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# Fits into a core's cache, where it is hashed and written right after it is read.
COPY_CHUNK_BYTES = 1 << 18
T = TypeVar("T")
R = TypeVar("R")
# Errors of link(2) for unsupported links, as opposed to failures: another file system, another user's file
# (fs.protected_hardlinks), a file system without links, too many links.
NO_LINK_ERRORS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


class TransferStopped(RuntimeError):
    """The transfer was cancelled because another file failed; users never see this error."""


class TransferProgress:
    """A thread-safe progress bar that can also stop all its threads.

    Args:
        bar: Displays the bytes.
    """

    def __init__(self, bar: ProgressBar):
        self._bar = bar
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def advance(self, amount: int) -> None:
        """Count `amount` bytes; a negative amount discards bytes that must be fetched again.

        Raises:
            TransferStopped: `stop` was called.
        """
        if self._stopped.is_set():
            raise TransferStopped("another file failed")
        with self._lock:
            self._bar.advance(amount)

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            TransferStopped: Another file failed.
        """
        if self._stopped.wait(seconds):
            raise TransferStopped("another file failed")

    def stop(self) -> None:
        """Cancel every transfer at its next chunk."""
        self._stopped.set()


def hash_twice(path: Path, second: Hash) -> str:
    """Read a file once, update `second` with it, and return its xxh3_128, 32 hex digits.

    Args:
        path: The file.
        second: A hashlib hash to update with the whole file.
    """
    first = xxhash.xxh3_128()
    for chunk in _chunks(path):
        first.update(chunk)
        second.update(chunk)
    return first.hexdigest()


def git_blob_hash(size_bytes: int) -> Hash:
    """Return a hash that yields Git's blob id of a file of `size_bytes`.

    Example:
        For an empty file it is e69de29bb2d1d6434b8b29ae775ad8c2e48c5391.
    """
    return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)


def copy_file(
    source: Path, target: Path, progress: TransferProgress, check: Callable[[str], None] = lambda found: None
) -> str:
    """Copy one file durably and return the xxh3_128 of the bytes that were read.

    Args:
        source: The file, or a link to it.
        target: Destination; an older file stays until the new one is complete.
        progress: Counts the bytes.
        check: Called with the hash before the copy gets its name; raises to reject it.
    """
    state = xxhash.xxh3_128()

    def write(file: BinaryIO) -> None:
        for chunk in _chunks(source):
            state.update(chunk)
            file.write(chunk)
            progress.advance(len(chunk))
        check(state.hexdigest())

    write_atomic(target, write)
    return state.hexdigest()


def copy_plainly(source: Path, target: Path) -> None:
    """Copy a small file durably."""

    def write(file: BinaryIO) -> None:
        with open(source, "rb") as content:
            shutil.copyfileobj(content, file)

    write_atomic(target, write)


def write_whole(file: RawIOBase, chunk: bytes | memoryview) -> None:
    """Write all of `chunk`: near a full disk a raw file may write only part of it, and raises on the next call."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def hard_link(source: Path, target: Path) -> bool:
    """Hard-link `source` to `target` and return True; False if the file systems do not allow it."""

    if target.exists() and target.samefile(source) and not target.is_symlink():
        return True
    try:
        # On Linux, linking a symlink would create another symlink: link its target.
        place_atomic(target, lambda temporary: os.link(source.resolve(strict=True), temporary))
    except OSError as error:
        if error.errno in NO_LINK_ERRORS:
            return False
        raise
    return True


def publish_link(source: Path, target: Path) -> None:
    """Link a complete, correct file durably to a second name on the same disk; replaces an older file."""
    place_atomic(target, lambda temporary: os.link(source, temporary))


class HashingFile:
    """A file open for writing that hashes the written bytes, so that they need not be read again.

    Args:
        file: Open and empty; the caller closes it.
        on_bytes: Called with the number of bytes after each write.
    """

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None] = lambda amount: None):
        self._file = file
        self._state = xxhash.xxh3_128()
        self._on_bytes = on_bytes
        self._failure: OSError | None = None
        self.size_bytes = 0

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Raise the original write error instead of torch.save's."""
        if self._failure:
            raise self._failure

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; returns its length, as torch.save expects of a file."""
        num_bytes = memoryview(data).nbytes
        try:
            self._file.write(data)
        except OSError as error:
            self._failure = error
            raise
        self._state.update(data)
        self.size_bytes += num_bytes
        self._on_bytes(num_bytes)
        return num_bytes

    def flush(self) -> None:
        """Flush the buffer; torch.save calls this."""
        self._file.flush()

    @property
    def xxh3_128(self) -> str:
        """Hash of all written bytes, 32 hex digits."""
        return self._state.hexdigest()


def run_parallel(work: Callable[[T], R], items: Sequence[T], workers: int, progress: TransferProgress) -> list[R]:
    """Return `work(item)` for all items, in order.

    Raises:
        Exception: The first error of any item. All other items stop at their next chunk before this returns.
    """
    complete = False
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
            complete = True
        finally:
            if not complete:
                progress.stop()
                pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise before the start if the disk is too small.

    Args:
        folder: Destination folder; it exists.
        needed_bytes: Bytes that remain to be written.
        what: Name for the message: "the rest of zai-org/GLM-5".

    Raises:
        OSError: Like the error of a full disk, with the required bytes in a note.
    """
    if needed_bytes > shutil.disk_usage(folder).free or (needed_bytes and lacks_inodes(folder)):
        with naming(folder, needed_bytes=needed_bytes):
            raise OSError(errno.ENOSPC, f"not enough disk space for {what}; nothing has been written yet", str(folder))


def remove_half_written(folder: Path) -> None:
    """Delete temporary files of killed processes in `folder` and its subfolders."""
    remove_dead_temporaries(folder.rglob(".*.tmp"))


def _chunks(path: Path) -> Iterator[memoryview]:
    """Yield a file's content; each chunk is valid until the next, and small enough to stay in a core's cache."""
    buffer = memoryview(bytearray(COPY_CHUNK_BYTES))
    with naming(path), open(path, "rb", buffering=0) as file:
        while length := file.readinto(buffer):
            yield buffer[:length]

"""Writes that survive a kill and a power cut: the old content or the new, never a mixture."""

from __future__ import annotations

import glob
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import xxhash

HASH_CHUNK_BYTES = 8 << 20


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then put it under its name: old content or new, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_temporaries(path)
    temporary = path.with_name(f"{_temporary_prefix(path)}{os.getpid()}.tmp")
    try:
        with _naming(path):
            write(temporary)
            _sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file durably."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def write_json(path: Path, content: Any) -> None:
    """Write JSON durably, one key per line, keys in the given order."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log of JSON lines durably; what a power cut left of an unfinished last line is cut off first."""
    with _naming(path), open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let the system's errors name the file, a full disk above all: those of an open file name none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    _sync(folder)


def sync_tree(folder: Path) -> None:
    """Make all files below `folder`, and their names, survive a power cut."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                _sync(Path(parent, name))
        _sync(Path(parent))


def make_next_folder(parent: Path) -> Path:
    """Make and return the next of numbered folders: `001`, `002`, ...

    Raises:
        FileExistsError: Somebody else has made it at the same time.
    """
    numbers = [int(path.name) for path in parent.glob("[0-9]*")]
    folder = parent / f"{max(numbers, default=0) + 1:03d}"
    folder.mkdir(parents=True)
    return folder


def hash_file(path: Path) -> str:
    """Return the xxh3_128 of a file's content, 32 hex digits."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.{socket.gethostname()}."


def _remove_dead_temporaries(path: Path) -> None:
    """Delete what processes of this host that were killed while writing `path` have left beside it."""
    prefix = _temporary_prefix(path)
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        pid = leftover.name.removeprefix(prefix).removesuffix(".tmp")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            leftover.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writes that survive a kill and a power cut: afterwards a file has its old or its new content, never a mixture.

A file is written under an unpredictable temporary name in the same folder, opened exclusively, so a link or file that
somebody else put there is never followed or used. The name contains the writing process, so the files of dead processes
are found and removed, and those of live ones are not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import xxhash

from posttrain.store.processes import started_ticks

# Large reads are faster on shared storage; still small compared to the memory of a thread.
HASH_CHUNK_BYTES = 8 << 20
# Characters of a file's name that its temporary name repeats, so that the latter does not become too long.
KEPT_CHARACTERS = 40


def write_atomic(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Write a temporary file with `write`, then rename it: the file has its old or its new content, never a mixture.

    Args:
        path: The file.
        write: Writes to the temporary file, which is open.
        mode: Permissions, before the umask.
    """
    _write(path, write, mode, Path.replace)


def place_atomic(path: Path, place: Callable[[Path], object]) -> None:
    """Link or move an existing file to a temporary name with `place`, then rename it as `write_atomic` does."""
    with _beside(path) as temporary:
        place(temporary)
        if not temporary.is_symlink():
            _sync(temporary)


def write_text(path: Path, text: str) -> None:
    """Write a text file durably."""
    write_atomic(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    """Write JSON durably, one key per line, keys in the given order."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_new(path: Path, text: str) -> None:
    """Create a text file durably and exclusively: only one of several concurrent processes succeeds.

    Args:
        path: The file.
        text: The content, different for each process.

    Raises:
        FileExistsError: Another process created the file first; its content stays.
    """
    _write(path, lambda file: file.write(text.encode()), 0o666, _link_new)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a log of JSON lines durably; an unfinished last line of a power cut is removed first."""
    with naming(path), open(path, "ab+", opener=open_no_link) as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def open_no_link(path: str, flags: int) -> int:
    """Open a file (an `opener` of `open`); a link in its place is an error, as somebody else may have put it there."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def naming(path: Path, temporary: Path | None = None, needed_bytes: int = 0) -> Iterator[None]:
    """Add the file's name to errors of the system, such as a full disk: errors of an open file contain none.

    Args:
        path: The file.
        temporary: Its temporary name, which is meaningless to users.
        needed_bytes: Its size, if known; added to the error as a note.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        if needed_bytes:
            error.add_note(f"needed: {needed_bytes} bytes ({needed_bytes / 2**30:.2f} GiB)")
        raise


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames inside it survive a power cut."""
    _sync(folder)


def sync_tree(folder: Path) -> None:
    """Sync all files below a folder, and their names, so that they survive a power cut."""
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            if not os.path.islink(os.path.join(parent, name)):
                _sync(Path(parent, name))
        _sync(Path(parent))


def make_next_folder(parent: Path) -> Path:
    """Make and return the next of numbered folders: `001`, `002`, ...

    Raises:
        FileExistsError: Another process made it at the same time.
    """
    numbers = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
    folder = parent / f"{max(numbers, default=0) + 1:03d}"
    folder.mkdir(parents=True)
    return folder


def hash_file(path: Path) -> str:
    """Return the xxh3_128 of a file's content, 32 hex digits."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def remove_dead_temporaries(paths: Iterable[Path]) -> None:
    """Delete the temporary files of processes of this host that were killed."""
    pattern = re.compile(rf"\..*\.{re.escape(socket.gethostname())}\.(\d+)\.(\d+)\.[0-9a-f]{{16}}\.tmp")
    for path in paths:
        writer = pattern.fullmatch(path.name)
        if writer and started_ticks(int(writer[1])) != int(writer[2]):
            # Files in another user's folder cannot be deleted.
            with contextlib.suppress(OSError):
                path.unlink()


def _write(path: Path, write: Callable[[BinaryIO], object], mode: int, publish: Callable[[Path, Path], object]) -> None:
    with _beside(path, publish) as temporary, open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _link_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        # The error alone is ambiguous: NFS may repeat a request whose answer was lost, and then find our own
        # link; SFTP reports only "failure".
        if not path.exists():
            raise
        if path.read_bytes() != temporary.read_bytes():
            raise FileExistsError(errno.EEXIST, "somebody else was faster", str(path)) from error


@contextmanager
def _beside(path: Path, publish: Callable[[Path, Path], object] = Path.replace) -> Iterator[Path]:
    """Yield an unused name in the folder of `path`; at the end, durably rename its file to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_dead_temporaries(path.parent.glob(".*.tmp"))
    ours = f"{socket.gethostname()}.{os.getpid()}.{started_ticks(os.getpid())}.{secrets.token_hex(8)}"
    temporary = path.with_name(f".{path.name[:KEPT_CHARACTERS]}.{ours}.tmp")
    with naming(path, temporary):
        try:
            yield temporary
            publish(temporary, path)
        finally:
            # A moved file is already gone; an error raised before must not be hidden by this one.
            with contextlib.suppress(OSError):
                temporary.unlink()
    sync_folder(path.parent)


def _raise(error: OSError) -> NoReturn:
    raise error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

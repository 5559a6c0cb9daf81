"""What is told where the machine refuses to write, on real file systems."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.small_disk import remount, small_disk

from posttrain.errors import REFUSALS, CheckpointError, explain, lacks_inodes
from posttrain.store import write_text

AGAIN = "then run the same command again: what is finished is kept"
# Writes as another user, and says what a script would say.
AS_ANOTHER = """
import os, sys
from pathlib import Path
from posttrain.store import write_text
from posttrain.errors import explain
os.setgroups([]), os.setgid(54321), os.setuid(54321)
try:
    write_text(Path(sys.argv[1]), "x")
except OSError as error:
    print(explain(error))
"""
OPEN_MANY = """
import resource, sys
from pathlib import Path
from posttrain.store import write_text
from posttrain.errors import explain
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
files = []
try:
    while True:
        files.append(open(sys.executable))
except OSError as error:
    print(explain(error))
"""


def told(path: Path, size: int = 1) -> list[str]:
    """Return the lines that a user sees when a file of this size cannot be written."""
    with pytest.raises(OSError, match=r"\[Errno \d+\]") as refused:
        write_text(path, "x" * size)
    return explain(refused.value).splitlines()


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=64k,nr_inodes=100") as disk:
        first, free, remedy = told(disk / "a" / "file", 1 << 20)
        assert first == f"{disk}/a/file: the disk is full"
        # The folder takes an inode, and so does the root.
        assert free == "  free:   65536 bytes (0.00 GiB), 98 files"
        assert remedy.startswith("  remedy: free some space there, or choose another folder: set='site.store=...'")
        assert remedy.endswith(AGAIN)
        remount(disk, "size=10m")
        write_text(disk / "a" / "file", "x" * (1 << 20))


def test_a_disk_without_inodes_is_not_told_as_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=10m,nr_inodes=2") as disk:
        assert not lacks_inodes(disk)
        (disk / "small").touch()
        assert lacks_inodes(disk)
        first, free, remedy = told(disk / "file")
        assert first == f"{disk}/file: no file can be made there any more: its inodes are used up"
        assert free == "  free:   10485760 bytes (0.01 GiB), 0 files"
        assert remedy.startswith("  remedy: delete files there, however small they are, or choose another folder")


def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m") as disk:
        remount(disk, "ro")
        first, remedy = told(disk / "file")
        assert first == f"{disk}/file: the file system is read-only"
        assert remedy.startswith("  remedy: have it mounted for writing, or choose another folder")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_missing_permission(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o750)
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o005:
            parent.chmod(parent.stat().st_mode | 0o055)
    words = [sys.executable, "-c", AS_ANOTHER, str(folder / "deep" / "file")]
    first, owner, remedy = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == f"{folder}/deep: permission denied"
    assert owner == f"  {folder} belongs to root, group root, mode 0750; this is 54321"
    assert remedy.startswith("  remedy: have its owner let you in (site.store_group shares a store), or choose another")


def test_too_many_open_files() -> None:
    first, remedy = subprocess.run(
        [sys.executable, "-c", OPEN_MANY], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert first == f"{sys.executable}: too many open files"
    assert remedy == f"  remedy: raise the limit (`ulimit -n`, `ulimit -Hn`); {AGAIN}"


def test_a_file_size_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        first, free, remedy = told(tmp_path / "file", 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert first == f"{tmp_path}/file: the file is larger than files may be"
    assert free.startswith("  free:   ")
    assert "ulimit -f" in remedy


@pytest.mark.parametrize("number", REFUSALS)
def test_every_refusal_has_a_remedy(tmp_path: Path, number: int) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "none" / "file"))
    first, *_, remedy = explain(error).splitlines()
    assert first.startswith(f"{tmp_path}/none/file: ")
    assert remedy.startswith("  remedy: ")


def test_the_cause_is_found_and_own_words_are_kept(tmp_path: Path) -> None:
    cause = OSError(errno.EROFS, "Read-only file system", str(tmp_path))
    cause.add_note("needed: 5 bytes")
    middle = RuntimeError("in the middle")
    middle.__cause__ = cause
    error = CheckpointError("some-code", "not written")
    error.__cause__ = middle
    assert explain(error).splitlines()[:3] == [
        "not written [some-code]",
        f"  because: {tmp_path}: the file system is read-only",
        "  needed: 5 bytes",
    ]
    assert explain(OSError(errno.ENOSPC, "not enough disk space for x", str(tmp_path))).startswith(
        f"{tmp_path}: not enough disk space for x\n"
    )
    assert explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))).startswith("the disk is full\n  remedy: ")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("x"),
        OSError("own words"),
        FileNotFoundError(errno.ENOENT, "gone", "file"),
        PermissionError(errno.EACCES, "a port below 1024"),
        ConnectionResetError(errno.ECONNRESET, "hung up"),
    ],
)
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert explain(error) == ""

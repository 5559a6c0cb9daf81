import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
import xxhash

from posttrain.checkpoint.file_placement import (
    TransferProgress,
    TransferStopped,
    copy_file,
    explain_full_disk,
    git_blob_hash,
    hard_link,
    hash_twice,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.observability.progress import ProgressBar


class CountingBar(ProgressBar):
    """A real bar whose sum can be read."""

    total_advanced = 0

    def advance(self, amount=1, note=""):
        self.total_advanced += amount
        super().advance(amount, note)


@pytest.fixture
def bar():
    return CountingBar("test", 1)


@pytest.fixture
def progress(bar):
    return TransferProgress(bar)


@pytest.fixture
def other_disk(tmp_path):
    folder = Path("/dev/shm")
    if not folder.is_dir() or folder.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    path = folder / f"posttrain-test-{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_known_hashes(tmp_path):
    """Git's id and the SHA-256 of an empty file are constants; "hello" is `git hash-object`'s answer."""
    (tmp_path / "empty").touch()
    (tmp_path / "hello").write_bytes(b"hello\n")
    empty, hello, sha256 = git_blob_hash(0), git_blob_hash(6), hashlib.sha256()
    assert hash_twice(tmp_path / "empty", empty) == "99aa06d3014798d86001c324468d497f"
    assert empty.hexdigest() == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    hash_twice(tmp_path / "hello", hello)
    assert hello.hexdigest() == "ce013625030ba8dba906f756967f9e9ca394464a"
    hash_twice(tmp_path / "empty", sha256)
    assert sha256.hexdigest() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_copy_returns_the_hash_of_what_it_wrote_and_counts_its_bytes(tmp_path, bar, progress):
    content = os.urandom(9 << 20)
    (tmp_path / "a").write_bytes(content)
    found = copy_file(tmp_path / "a", tmp_path / "deep" / "b", progress)
    assert found == xxhash.xxh3_128(content).hexdigest()
    assert (tmp_path / "deep" / "b").read_bytes() == content
    assert bar.total_advanced == 9 << 20


def test_a_refused_copy_leaves_the_old_file_and_nothing_else(tmp_path, progress):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")

    def refuse(found):
        raise ValueError(found)

    with pytest.raises(ValueError, match=xxhash.xxh3_128(b"new").hexdigest()):
        copy_file(tmp_path / "a", tmp_path / "b", progress, refuse)
    assert (tmp_path / "b").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_hard_link_gives_a_second_name_also_to_the_file_behind_a_symlink(tmp_path):
    (tmp_path / "blob").write_text("x")
    (tmp_path / "pointer").symlink_to("blob")
    assert hard_link(tmp_path / "pointer", tmp_path / "linked")
    assert not (tmp_path / "linked").is_symlink()
    assert (tmp_path / "linked").samefile(tmp_path / "blob")
    assert hard_link(tmp_path / "pointer", tmp_path / "linked")


def test_hard_link_replaces_another_file_of_that_name(tmp_path):
    (tmp_path / "a").write_text("right")
    (tmp_path / "b").write_text("wrong")
    assert hard_link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "right"


def test_no_hard_link_to_another_file_system(tmp_path, other_disk):
    (tmp_path / "a").write_text("x")
    assert not hard_link(tmp_path / "a", other_disk / "a")
    assert list(other_disk.iterdir()) == []


def test_parallel_keeps_the_order_and_uses_several_threads(progress):
    barrier = threading.Barrier(3, timeout=10)

    def work(item):
        barrier.wait()
        time.sleep(0.01 * (3 - item))
        return item * 10

    assert run_parallel(work, [0, 1, 2], 3, progress) == [0, 10, 20]


def test_parallel_raises_the_first_error_and_stops_the_others(progress):
    stopped = threading.Event()

    def work(item):
        if item == "bad":
            raise OSError(errno.EIO, "broken")
        try:
            while True:
                progress.advance(1)
                time.sleep(0.001)
        except TransferStopped:
            stopped.set()
            raise

    with pytest.raises(OSError, match="broken"):
        run_parallel(work, ["endless", "bad", "endless"], 2, progress)
    assert stopped.is_set()


def test_free_space_is_compared_with_what_is_needed(tmp_path):
    require_free_space(tmp_path, 1, "one byte")
    with pytest.raises(RuntimeError, match=r"not enough disk space for a lot\n  needed: 1152921504606846976 bytes"):
        require_free_space(tmp_path, 1 << 60, "a lot")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_explained(tmp_path, number):
    with (
        pytest.raises(RuntimeError, match="free some space and run again") as raised,
        explain_full_disk(tmp_path),
    ):
        raise OSError(number, os.strerror(number))
    assert raised.value.__cause__.errno == number


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), explain_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_only_half_files_of_dead_processes_of_this_host_are_removed(tmp_path):
    host = os.uname().nodename
    dead = [
        tmp_path / f".model.safetensors.{host}.{2**22 + 7}.tmp",
        tmp_path / "deep" / f".a.{host}.{os.getpid()}.tmp",
    ]
    kept = [
        tmp_path / f".model.safetensors.{host}.1.tmp",
        tmp_path / ".model.safetensors.elsewhere.7.tmp",
        tmp_path / "model.safetensors",
        tmp_path / ".hidden.tmp",
    ]
    (tmp_path / "deep").mkdir()
    for path in (*dead, *kept):
        path.touch()
    remove_half_written(tmp_path)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in kept)

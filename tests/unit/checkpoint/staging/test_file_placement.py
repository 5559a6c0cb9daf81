import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
import xxhash
from tests.support.small_disk import small_disk

from posttrain.checkpoint.staging.file_placement import (
    TransferProgress,
    TransferStopped,
    copy_file,
    git_blob_hash,
    hard_link,
    hash_twice,
    remove_half_written,
    require_free_space,
    run_parallel,
)
from posttrain.errors import explain
from posttrain.report.progress import ProgressBar


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
    with pytest.raises(OSError, match="not enough disk space for a lot; nothing has been written yet") as refused:
        require_free_space(tmp_path, 1 << 60, "a lot")
    assert refused.value.errno == errno.ENOSPC
    first, needed, *_ = explain(refused.value).splitlines()
    assert first == f"{tmp_path}: not enough disk space for a lot; nothing has been written yet"
    assert needed == "  needed: 1152921504606846976 bytes (1073741824.00 GiB)"


def test_without_inodes_there_is_no_room_however_much_is_free(tmp_path):
    with small_disk(tmp_path, "nr_inodes=3") as disk:
        require_free_space(disk, 1000, "a file")
        (disk / "a").touch()
        (disk / "b").touch()
        require_free_space(disk, 0, "nothing")
        with pytest.raises(OSError, match="not enough disk space for a file") as refused:
            require_free_space(disk, 1000, "a file")
        assert "its inodes are used up" in explain(refused.value)


def test_a_disk_that_becomes_full_is_named_with_the_file(tmp_path, progress):
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    with small_disk(tmp_path, "size=1m") as disk:
        with pytest.raises(OSError, match="No space left on device") as refused:
            copy_file(tmp_path / "a", disk / "b", progress)
        assert explain(refused.value).startswith(f"{disk}/b: the disk is full\n  free:   ")
        assert list(disk.iterdir()) == []


def test_half_files_of_dead_processes_are_removed_wherever_they_lie(tmp_path):
    """Whose they are is told in tests/unit/store/test_durable.py."""
    half = f"{os.uname().nodename}.{2**22 + 7}.5.{'a' * 16}.tmp"
    (tmp_path / "deep").mkdir()
    for name in (f".model.{half}", f"deep/.a.{half}", "deep/a"):
        (tmp_path / name).touch()
    remove_half_written(tmp_path)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["deep", "a"]

"""Durable writes: what reaches the disk and in which order, and what an error leaves."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from tests.support.system_calls import Calls

from posttrain.store import (
    HASH_CHUNK_BYTES,
    append_json_line,
    hash_file,
    make_next_folder,
    place_atomic,
    sync_folder,
    sync_tree,
    write_atomic,
    write_json,
    write_text,
)
from posttrain.store.durable import naming, write_new

LIMIT_BYTES = 4096
# In a process of its own: the limit holds for every file, the report of the tests too.
WRITE = """
import sys
from pathlib import Path
from posttrain.store import append_json_line, write_text
path, limit = Path(sys.argv[1]), int(sys.argv[2])
try:
    {write}
except OSError as error:
    print(error.filename, error.strerror, error, sep="\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where things are written; nothing else lies there."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def temporaries(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.tmp"))


# ---- what reaches the disk ----


def write_bytes(path: Path) -> None:
    write_atomic(path, lambda file: file.write(b"new"))


def place_link(path: Path) -> None:
    source = path.parents[1] / "source"
    source.write_text("new")
    place_atomic(path, lambda temporary: os.link(source, temporary))


@pytest.mark.parametrize("write", [write_bytes, place_link, lambda path: write_text(path, "new")])
def test_the_old_content_or_the_new(write: Callable[[Path], None], folder: Path, monkeypatch) -> None:
    """The new bytes are on the disk before the name is theirs, and the name before the call returns."""
    path, seen = folder / "file", []
    path.write_text("old")

    def look(name: str, *paths: str) -> None:
        if name == "replace" or (name == "fsync" and paths[0] != str(folder)):
            seen.append((path.read_text(), Path(paths[0]).read_text()))

    calls = Calls(monkeypatch, look)
    write(path)
    (temporary,) = {call[1] for call in calls.of("replace")}
    assert Path(temporary).parent == folder
    assert calls.of("fsync", "replace", "rename", "unlink") == [
        ("fsync", temporary),
        ("replace", temporary, str(path)),
        ("fsync", str(folder)),
    ]
    assert seen == [("old", "new")] * 2
    assert path.read_text() == "new"
    assert os.listdir(folder) == ["file"]


def test_a_link_is_placed_but_what_it_points_to_is_not_written(folder: Path, monkeypatch) -> None:
    calls = Calls(monkeypatch)
    place_atomic(folder / "link", lambda temporary: os.symlink("nowhere", temporary))
    assert (folder / "link").readlink() == Path("nowhere")
    assert [call[0] for call in calls.of("fsync", "replace")] == ["replace", "fsync"]


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "file", "ü\n")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"\xc3\xbc\n"


def test_json_has_a_key_per_line_in_the_given_order(folder: Path) -> None:
    write_json(folder / "file", {"b": 1, "a": [1.5]})
    assert (folder / "file").read_text() == '{\n  "b": 1,\n  "a": [\n    1.5\n  ]\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(folder / "file", {"x": float("nan")})
    assert json.loads((folder / "file").read_text()) == {"b": 1, "a": [1.5]}


def test_a_tree_is_synced_whole(folder: Path, monkeypatch) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("1", "a/2", "a/b/3"):
        (folder / name).touch()
    (folder / "a" / "link").symlink_to("nowhere")
    calls = Calls(monkeypatch)
    sync_tree(folder)
    expected = [folder, *(folder / name for name in ("1", "a", "a/2", "a/b", "a/b/3"))]
    assert sorted(calls.of("fsync")) == sorted(("fsync", str(path)) for path in expected)
    with pytest.raises(FileNotFoundError):
        sync_tree(folder / "none")


def test_a_folder_is_synced_and_its_descriptor_closed(folder: Path, monkeypatch) -> None:
    calls, before = Calls(monkeypatch), len(os.listdir("/proc/self/fd"))
    sync_folder(folder)
    assert calls.made == [("fsync", str(folder))]
    assert len(os.listdir("/proc/self/fd")) == before


# ---- rows of a log ----


def test_a_row_is_on_the_disk_when_it_is_told(folder: Path, monkeypatch) -> None:
    path, synced = folder / "log.jsonl", []
    calls = Calls(monkeypatch, lambda name, where: synced.append((where, path.read_bytes())))
    append_json_line(path, {"a": 1})
    assert synced[0] == (str(path), b'{"a": 1}\n')
    assert calls.of("fsync") == [("fsync", str(path)), ("fsync", str(folder))]
    append_json_line(path, {"b": None})
    assert path.read_bytes() == b'{"a": 1}\n{"b": null}\n'


@pytest.mark.parametrize("torn", [b"", b'{"a": 1}\n', b'{"a": 1}\n\n'])
def test_what_a_power_cut_left_of_a_row_is_cut_off(folder: Path, torn: bytes) -> None:
    path = folder / "log.jsonl"
    path.write_bytes(torn + b'{"half')
    append_json_line(path, {"b": 2})
    assert path.read_bytes() == torn + b'{"b": 2}\n'


def test_a_row_that_is_no_json_is_not_written(folder: Path) -> None:
    path = folder / "log.jsonl"
    append_json_line(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_json_line(path, {"x": float("inf")})
    assert path.read_bytes() == b'{"a": 1}\n'


# ---- failures ----


@pytest.mark.parametrize("write", ["write_text(path, 'x' * 2 * limit)", "append_json_line(path, {'x': 'y' * limit})"])
def test_a_write_for_which_there_is_no_room_names_the_file(tmp_path: Path, write: str) -> None:
    path = tmp_path / "file.json"
    said = subprocess.run(
        [sys.executable, "-c", WRITE.format(write=write), str(path), str(LIMIT_BYTES)],
        # The system refuses the write, as on a full disk.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    filename, reason, message = said
    assert filename == str(path)
    assert reason == "File too large"
    assert str(path) in message
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("refused")])
def test_a_write_that_fails_leaves_what_was_there(folder: Path, error: BaseException) -> None:
    (folder / "file").write_text("old")

    def fail(file) -> None:
        file.write(b"new")
        raise error

    with pytest.raises(type(error)) as raised:
        write_atomic(folder / "file", fail)
    assert raised.value is error
    assert os.listdir(folder) == ["file"]
    assert (folder / "file").read_text() == "old"


def test_errors_name_the_file_and_what_it_would_have_taken(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full") as raised, naming(tmp_path / "file", needed_bytes=3 << 30):
        raise OSError(errno.ENOSPC, "full")
    assert raised.value.filename == str(tmp_path / "file")
    assert raised.value.__notes__ == ["needed: 3221225472 bytes (3.00 GiB)"]
    with pytest.raises(OSError, match="full") as raised, naming(tmp_path / "file", tmp_path / "temporary"):
        raise OSError(errno.ENOSPC, "full", str(tmp_path / "temporary"))
    assert raised.value.filename == str(tmp_path / "file"), "nobody knows the temporary name"
    with pytest.raises(OSError, match="gone") as raised, naming(tmp_path / "file"):
        raise OSError(errno.ENOENT, "gone", "another")
    assert raised.value.filename == "another"
    assert not hasattr(raised.value, "__notes__")
    with pytest.raises(OSError, match="own words") as raised, naming(tmp_path / "file"):
        raise OSError("own words")
    assert raised.value.filename is None


# ---- a name for one of several ----


def test_of_several_one_gets_the_name(folder: Path, monkeypatch) -> None:
    calls = Calls(monkeypatch)
    write_new(folder / "name", "first")
    (temporary,) = {call[1] for call in calls.of("link")}
    assert calls.of("fsync", "link", "unlink", "replace") == [
        ("fsync", temporary),
        ("link", temporary, str(folder / "name")),
        ("unlink", temporary),
        ("fsync", str(folder)),
    ]
    with pytest.raises(FileExistsError) as raised:
        write_new(folder / "name", "second")
    told = (raised.value.errno, raised.value.strerror, raised.value.filename)
    assert told == (errno.EEXIST, "somebody else was faster", str(folder / "name"))
    assert (folder / "name").read_text() == "first"
    assert os.listdir(folder) == ["name"]


def test_an_answer_that_was_lost_is_no_failure(folder: Path, monkeypatch) -> None:
    """As over NFS: the link is made, the answer is lost, and the repeated request finds the name taken."""
    link = os.link

    def link_twice(*places: Path) -> None:
        link(*places)
        link(*places)

    monkeypatch.setattr(os, "link", link_twice)
    write_new(folder / "name", "ours")
    assert (folder / "name").read_text() == "ours"


def test_a_link_that_cannot_be_made_is_told(folder: Path, monkeypatch) -> None:
    def refuse(*places: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PermissionError, match="no links here"):
        write_new(folder / "name", "ours")
    assert os.listdir(folder) == []


# ---- the rest ----


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([], "001"),
        (["001", "002"], "003"),
        (["002", "010", "009"], "011"),
        (["999"], "1000"),
        (["1000", "999"], "1001"),
        (["007", "12abc", "x", "9.log"], "008"),
    ],
)
def test_numbered_folders(folder: Path, there: list[str], expected: str) -> None:
    for name in there:
        (folder / name).mkdir()
    assert make_next_folder(folder) == folder / expected
    assert (folder / expected).is_dir()


def test_of_two_at_once_one_has_to_try_again(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [])
    assert make_next_folder(folder / "new") == folder / "new" / "001"
    with pytest.raises(FileExistsError):
        make_next_folder(folder / "new")


@pytest.mark.parametrize(
    ("size", "expected"), [(0, "99aa06d3014798d86001c324468d497f"), (8 << 20, None), ((8 << 20) + 1, None)]
)
def test_hashes(folder: Path, size: int, expected: str | None) -> None:
    assert HASH_CHUNK_BYTES == 8_388_608, "what a file of any size takes of memory"
    content = os.urandom(size)
    (folder / "file").write_bytes(content)
    assert hash_file(folder / "file") == (expected or xxhash.xxh3_128(content).hexdigest())

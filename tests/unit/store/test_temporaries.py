"""Where files are written before they have their name: whose links are followed, whose leftovers are removed."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.system_calls import Calls

from posttrain.store import (
    append_json_line,
    write_atomic,
    write_text,
)
from posttrain.store.durable import remove_dead_temporaries, write_new
from posttrain.store.processes import started_ticks

# Writes half a file, says so, and waits.
HALF = """
import sys
from pathlib import Path
from posttrain.store import write_atomic
def half(file):
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    sys.stdin.readline()
write_atomic(Path(sys.argv[1]), half)
"""
HOST = os.uname().nodename


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where things are written; nothing else lies there."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def half_written(folder: Path) -> Iterator[subprocess.Popen]:
    """A living process in the middle of writing `folder/file`."""
    writer = subprocess.Popen(
        [sys.executable, "-c", HALF, str(folder / "file")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "half\n"
    yield writer
    writer.kill()
    writer.communicate()


def temporaries(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.tmp"))


# ---- names that others have taken, and links that they have planted ----


def test_nobody_can_guess_where_a_file_is_written(folder: Path, monkeypatch) -> None:
    calls = Calls(monkeypatch)
    for _ in range(20):
        write_text(folder / "file", "x")
    names = {call[1] for call in calls.of("replace")}
    assert len(names) == 20
    assert all(len(secret) == 16 for secret in (name.split(".")[-2] for name in names))


@pytest.mark.parametrize("planted", ["link", "dangling link", "file"])
def test_what_was_planted_is_neither_followed_nor_used(folder: Path, tmp_path: Path, monkeypatch, planted: str) -> None:
    """Even where somebody has guessed the name."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    victim, path = tmp_path / "victim", folder / "file"
    taken = folder / f".file.{HOST}.{os.getpid()}.{started_ticks(os.getpid())}.{'0' * 16}.tmp"
    if planted != "dangling link":
        victim.write_text("precious")
    taken.symlink_to(victim) if "link" in planted else taken.touch(mode=0o666)
    with pytest.raises(FileExistsError) as raised:
        write_text(path, "secret")
    assert raised.value.filename == str(path)
    assert not path.exists()
    assert (victim.read_text() if victim.exists() else "nothing") == ("nothing" if "d" in planted[:1] else "precious")


@pytest.mark.parametrize(("umask", "expected"), [(0o000, 0o666), (0o027, 0o640)])
def test_a_file_is_as_open_as_asked_whatever_it_was_before(folder: Path, umask: int, expected: int) -> None:
    for name in ("secret", "file", "text"):
        (folder / name).touch()
        (folder / name).chmod(0o777)
    before = os.umask(umask)
    try:
        write_atomic(folder / "secret", lambda file: file.write(b"x"), 0o600)
        write_atomic(folder / "file", lambda file: file.write(b"x"))
        write_text(folder / "text", "x")
        write_new(folder / "new", "x")
        append_json_line(folder / "log", {})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"secret": 0o600, **dict.fromkeys(("file", "text", "new", "log"), expected)}


def test_a_temporary_name_begins_as_the_files(folder: Path, monkeypatch) -> None:
    calls = Calls(monkeypatch)
    write_text(folder / ("n" * 100), "x")
    ((_, temporary, _),) = calls.of("replace")
    assert Path(temporary).name.startswith(f".{'n' * 40}.{HOST}.{os.getpid()}.{started_ticks(os.getpid())}.")


def test_rows_are_not_added_behind_a_link(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("no newline: it would be emptied")
    (folder / "log.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links") as raised:
        append_json_line(folder / "log.jsonl", {"a": 1})
    assert raised.value.errno == errno.ELOOP
    assert victim.read_text() == "no newline: it would be emptied"


def test_a_name_that_is_as_long_as_can_be(folder: Path) -> None:
    name = "n" * 255
    write_text(folder / name, "x")
    assert os.listdir(folder) == [name]


# ---- what killed processes leave ----


def test_a_living_writers_file_stays_and_a_dead_ones_goes(folder: Path, half_written: subprocess.Popen) -> None:
    (temporary,) = temporaries(folder)
    remove_dead_temporaries([temporary])
    write_text(folder / "file", "another's")
    assert temporary.exists()
    assert temporary.read_text() == "half"
    half_written.communicate("\n")
    assert half_written.returncode == 0
    assert (folder / "file").read_text() == "half"
    assert temporaries(folder) == []


def test_a_killed_writers_file_goes_with_the_next_write(folder: Path, half_written: subprocess.Popen) -> None:
    (temporary,) = temporaries(folder)
    half_written.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, half_written.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    write_text(folder / "other", "x")
    assert not temporary.exists()


def test_only_what_dead_processes_of_this_host_were_writing_goes(folder: Path) -> None:
    mine, ticks = os.getpid(), started_ticks(os.getpid())
    no_process = 2**22 + 7
    dead = [
        f".weights.{HOST}.{no_process}.5.{'a' * 16}.tmp",
        f".weights.{HOST}.{mine}.{ticks - 1}.{'a' * 16}.tmp",
        f".a.b.{HOST}.{mine}.{ticks + 1}.{'0' * 16}.tmp",
    ]
    kept = [
        f".weights.{HOST}.{mine}.{ticks}.{'a' * 16}.tmp",
        f".weights.{HOST}.1.{started_ticks(1)}.{'a' * 16}.tmp",
        f".weights.elsewhere.{no_process}.5.{'a' * 16}.tmp",
        f".weights.{HOST}.{no_process}.5.{'a' * 15}.tmp",
        f".weights.{HOST}.{no_process}.5.{'a' * 16}.tmp.txt",
        f"weights.{HOST}.{no_process}.5.{'a' * 16}.tmp",
        f".weights.{HOST}.x.5.{'a' * 16}.tmp",
        "weights",
    ]
    for name in (*dead, *kept):
        (folder / name).touch()
    remove_dead_temporaries(sorted(folder.iterdir()))
    assert sorted(os.listdir(folder)) == sorted(kept)


def test_what_may_not_be_removed_does_not_fail_a_write(folder: Path) -> None:
    (folder / f".weights.{HOST}.{2**22 + 7}.5.{'a' * 16}.tmp").mkdir()
    write_text(folder / "file", "x")
    assert (folder / "file").read_text() == "x"

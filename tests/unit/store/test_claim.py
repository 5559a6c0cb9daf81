"""Claims on artefacts, with real processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from posttrain.store import (
    FORMAT_VERSIONS,
    Receipt,
    build_lock,
    building,
    claim,
    part_receipt_of,
    partial_of,
    receipt_of,
    record_files,
    write_receipt,
)
from posttrain.store.build_lock import confirm, hold, lock_folder_of, release
from posttrain.store.lease import LeaseLostError, living_holder
from posttrain.store.receipts import BACKUPS_VARIABLE

WANTED = Receipt("patch_hf_config", (), {"hf": "0" * 64}, {"target": "native"})
MAKE = """
    import logging, sys
    from pathlib import Path
    from posttrain.store import Receipt, building, claim, receipt_of, record_files, write_receipt
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    folder = Path(sys.argv[1])
    wanted = Receipt("patch_hf_config", (), {"hf": "0" * 64}, {"target": "native"})
    if claim(receipt_of(folder), wanted, folder):
        print("makes it", flush=True)
        with building(folder) as partial:
            (partial / "config.json").write_text("{}")
            sys.stdin.readline()
        write_receipt(receipt_of(folder), Receipt(wanted.step, record_files(folder), wanted.inputs, wanted.settings))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the artefact goes; nothing is held any more when the test is over."""
    yield tmp_path / "hf_patched"
    for receipt in list(build_lock._held):
        release(receipt)


def start_maker(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", textwrap.dedent(MAKE), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def make(folder: Path, wanted: Receipt = WANTED, content: str = "{}") -> None:
    """Make the artefact in this process."""
    with building(folder) as partial:
        (partial / "config.json").write_text(content)
    write_receipt(receipt_of(folder), dataclasses.replace(wanted, files=record_files(folder)))


def test_the_second_waits_is_told_for_whom_and_finds_the_work_done(folder: Path) -> None:
    first = start_maker(folder)
    assert first.stdout.readline() == "makes it\n"
    second = start_maker(folder)
    waiting = second.stdout.readline()
    assert waiting.startswith(f"waiting: {folder} is being made by process {first.pid} on {os.uname().nodename} (user ")
    first.communicate("\n")
    assert second.communicate()[0] == f"{folder}: was made meanwhile\n"
    assert len(folder.with_name("hf_patched.history.jsonl").read_text().splitlines()) == 1
    assert living_holder(lock_folder_of(receipt_of(folder))) is None


def test_the_second_takes_over_from_one_that_was_killed(folder: Path) -> None:
    first = start_maker(folder)
    assert first.stdout.readline() == "makes it\n"
    second = start_maker(folder)
    assert second.stdout.readline().startswith("waiting: ")
    first.kill()
    first.wait()
    assert second.stdout.readline() == "makes it\n"
    second.communicate("\n")
    assert not claim(receipt_of(folder), WANTED, folder)


def test_who_was_believed_dead_shows_nothing(folder: Path) -> None:
    assert claim(receipt_of(folder), WANTED, folder)
    lock = lock_folder_of(receipt_of(folder))
    (lock / "epoch-000002.json").write_text((lock / "epoch-000001.json").read_text().replace(": 1,", ": 2,"))
    with pytest.raises(LeaseLostError):
        make(folder)
    assert not folder.exists()
    assert not receipt_of(folder).exists()


@pytest.mark.parametrize(
    "wanted",
    [
        dataclasses.replace(WANTED, inputs={"hf": "1" * 64}),
        dataclasses.replace(WANTED, settings={"target": "deepseek_v32"}),
        dataclasses.replace(WANTED, step="quantize_serving"),
    ],
)
def test_what_stands_for_something_else_is_made_anew(folder: Path, wanted: Receipt) -> None:
    assert claim(receipt_of(folder), WANTED, folder)
    make(folder)
    assert claim(receipt_of(folder), WANTED, folder) is False
    assert claim(receipt_of(folder), wanted, folder) is True
    assert not receipt_of(folder).exists()
    make(folder, wanted)
    assert living_holder(lock_folder_of(receipt_of(folder))) is None, "it is made: nobody waits any longer"
    assert not claim(receipt_of(folder), wanted, folder)


def test_another_format_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    monkeypatch.setitem(FORMAT_VERSIONS, "patch_hf_config", 2)
    assert claim(receipt_of(folder), WANTED, folder)


def test_a_lost_file_or_a_newer_source_is_made_anew(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("{}")
    make(folder)
    assert not claim(receipt_of(folder), WANTED, folder, [source])
    made = receipt_of(folder).stat().st_mtime
    os.utime(source, (made + 1, made + 1))
    assert claim(receipt_of(folder), WANTED, folder, [source])
    make(folder)
    (folder / "config.json").unlink()
    assert claim(receipt_of(folder), WANTED, folder)


def test_a_failed_step_does_not_get_its_old_receipt_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake keeps a copy of what a job updates; tests/workflow/test_shared_store.py has the real one."""
    make(folder)
    monkeypatch.setenv(BACKUPS_VARIABLE, str(tmp_path / "backups"))
    backup = tmp_path / "backups" / receipt_of(folder).relative_to("/")
    backup.parent.mkdir(parents=True)
    backup.write_text(receipt_of(folder).read_text())
    assert not claim(receipt_of(folder), WANTED, folder)
    assert backup.exists()
    assert claim(receipt_of(folder), dataclasses.replace(WANTED, inputs={}), folder)
    assert not backup.exists()


def supersede(receipt: Path) -> None:
    """Let another process take over what this one holds."""
    lock = lock_folder_of(receipt)
    (lock / "epoch-000002.json").write_text((lock / "epoch-000001.json").read_text().replace(": 1,", ": 2,"))


def test_who_was_superseded_after_his_folder_was_there_writes_no_receipt(folder: Path) -> None:
    assert claim(receipt_of(folder), WANTED, folder)
    with building(folder) as partial:
        (partial / "config.json").write_text("{}")
    supersede(receipt_of(folder))
    with pytest.raises(LeaseLostError):
        write_receipt(receipt_of(folder), dataclasses.replace(WANTED, files=record_files(folder)))
    assert not receipt_of(folder).exists()
    release(receipt_of(folder))
    assert not (lock_folder_of(receipt_of(folder)) / "epoch-000002.released").exists()


def test_a_part_that_was_taken_over_is_noticed(folder: Path) -> None:
    part = part_receipt_of(folder, 0)
    hold(receipt_of(folder), [part])
    confirm(receipt_of(folder))
    supersede(part)
    with pytest.raises(LeaseLostError):
        confirm(receipt_of(folder))
    release(receipt_of(folder))


def test_what_is_held_is_held_once_and_given_back_whole(folder: Path) -> None:
    receipt, part = receipt_of(folder), part_receipt_of(folder, 0)
    confirm(receipt)
    release(receipt)
    hold(receipt, [part])
    hold(receipt, [part])
    for held in (receipt, part):
        assert living_holder(lock_folder_of(held)).epoch == 1
    release(receipt)
    for held in (receipt, part):
        assert living_holder(lock_folder_of(held)) is None
    hold(receipt)
    assert living_holder(lock_folder_of(receipt)).epoch == 2
    release(receipt)


def test_where_locks_lie() -> None:
    assert lock_folder_of(Path("store/hf.receipt.json")) == Path("store/hf.lease")
    assert lock_folder_of(Path("store/hf.parts/3.receipt.json")) == Path("store/hf.parts/3.lease")


def test_an_error_while_locks_are_taken_gives_back_those_that_were(folder: Path) -> None:
    part = part_receipt_of(folder, 0)
    part.parent.parent.mkdir(exist_ok=True)
    part.parent.touch()
    with pytest.raises((FileExistsError, NotADirectoryError)):
        hold(receipt_of(folder), [part])
    assert living_holder(lock_folder_of(receipt_of(folder))) is None
    part.parent.unlink()
    hold(receipt_of(folder), [part])
    assert living_holder(lock_folder_of(part)).pid == os.getpid()
    release(receipt_of(folder))


def test_who_waits_is_told_at_once_and_reminded_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, told = [1000.0], []
    holder = start_maker(folder)
    assert holder.stdout.readline() == "makes it\n"

    def sleep(seconds: float, really: Callable[[float], None] = time.sleep) -> None:
        if threading.current_thread() is not threading.main_thread():
            return really(seconds)  # of somebody else: `time` is everybody's
        told.append((now[0], len(caplog.records)))
        now[0] += 30.0
        if len(told) == 6:
            holder.communicate("\n")

    monkeypatch.setattr("posttrain.store.build_lock.time.sleep", sleep)
    monkeypatch.setattr("posttrain.store.build_lock.time.monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "posttrain.store.build_lock"):
        hold(receipt_of(folder))
    release(receipt_of(folder))
    assert told == [(1000.0, 1), (1030.0, 1), (1060.0, 1), (1090.0, 2), (1120.0, 2), (1150.0, 2)]
    assert {row.getMessage().partition(" on ")[0] for row in caplog.records} == {
        f"waiting: {folder} is being made by process {holder.pid}"
    }


def test_a_part_is_looked_for_where_it_is_made(folder: Path) -> None:
    part = part_receipt_of(folder, 0)
    partial_of(folder).mkdir()
    (partial_of(folder) / "shard").write_text("x")
    made = dataclasses.replace(WANTED, files=record_files(partial_of(folder)))
    write_receipt(part, made)
    assert not claim(part, WANTED, folder)
    partial_of(folder).rename(folder)
    assert not claim(part, WANTED, folder)
    write_receipt(receipt_of(folder), made)
    assert not claim(receipt_of(folder), WANTED, folder)
    folder.rename(partial_of(folder))
    assert claim(receipt_of(folder), WANTED, folder), "what is half made is no whole"
    release(receipt_of(folder))


def test_files_that_are_wanted_must_be_among_those_that_were_made(folder: Path) -> None:
    make(folder)
    (record,) = record_files(folder)
    assert not claim(receipt_of(folder), dataclasses.replace(WANTED, files=(record,)), folder)
    other = dataclasses.replace(record, xxh3_128="0" * 32)
    assert claim(receipt_of(folder), dataclasses.replace(WANTED, files=(other,)), folder)
    release(receipt_of(folder))


def test_all_settings_that_are_asked_for_must_fit(folder: Path) -> None:
    make(folder, dataclasses.replace(WANTED, settings={"target": "native", "more": 1}))
    assert not claim(receipt_of(folder), dataclasses.replace(WANTED, settings={"target": "native", "more": 1}), folder)
    assert claim(receipt_of(folder), dataclasses.replace(WANTED, settings={"target": "native", "more": 2}), folder)


def test_what_is_there_is_told_and_what_was_made_meanwhile_is_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_hold = build_lock.hold

    def hold_late(receipt: Path, parts: Iterable[Path]) -> None:
        make(folder)
        really_hold(receipt, parts)

    monkeypatch.setattr(build_lock, "hold", hold_late)
    with caplog.at_level(logging.INFO, "posttrain.store.receipts"):
        assert claim(receipt_of(folder), WANTED, folder) is False
        assert living_holder(lock_folder_of(receipt_of(folder))) is None
        assert not claim(receipt_of(folder), WANTED, folder)
    told = [row.getMessage() for row in caplog.records]
    assert told == [f"{folder}: was made meanwhile", f"{folder}: is there already"]


def test_settings_that_nobody_asked_for_do_not_matter(folder: Path) -> None:
    make(folder, dataclasses.replace(WANTED, settings={"target": "native", "more": 1}))
    assert not claim(receipt_of(folder), WANTED, folder)
    assert claim(receipt_of(folder), dataclasses.replace(WANTED, settings={"other": 1}), folder)
    release(receipt_of(folder))


def test_a_file_that_has_grown_is_made_anew(folder: Path) -> None:
    make(folder)
    with open(folder / "config.json", "a") as file:
        file.write(" ")
    assert claim(receipt_of(folder), WANTED, folder)
    release(receipt_of(folder))


def test_sources_are_looked_at_both_before_and_after_waiting(folder: Path, tmp_path: Path) -> None:
    """Given as an iterator, too."""
    source = tmp_path / "rows.jsonl"
    source.write_text("{}")
    make(folder)
    changed, receipt = source.stat().st_ctime_ns, receipt_of(folder)
    os.utime(receipt, ns=(changed, changed))
    assert not claim(receipt, WANTED, folder, iter([source])), "as old as the receipt"
    os.utime(source, (receipt.stat().st_mtime + 1,) * 2)
    assert claim(receipt, WANTED, folder, iter([source]))
    release(receipt)


def test_an_older_file_that_takes_a_sources_place_makes_it_anew(folder: Path, tmp_path: Path) -> None:
    source, older = tmp_path / "rows.jsonl", tmp_path / "older.jsonl"
    for path in (source, older):
        path.write_text(path.name)
        os.utime(path, (1.0, 1.0))
    time.sleep(0.05)  # as finely as file systems tell times
    make(folder)
    assert not claim(receipt_of(folder), WANTED, folder, [source])
    time.sleep(0.05)
    older.rename(source)
    assert source.stat().st_mtime == 1.0
    assert claim(receipt_of(folder), WANTED, folder, [source])
    release(receipt_of(folder))


def test_a_fork_does_not_give_away_what_its_parent_holds(folder: Path) -> None:
    script = """
        import os, sys
        from pathlib import Path
        from posttrain.store.build_lock import hold, lock_folder_of
        from posttrain.store.lease import living_holder
        receipt = Path(sys.argv[1])
        hold(receipt)
        if child := os.fork():
            os.waitpid(child, 0)
            print(living_holder(lock_folder_of(receipt)).pid == os.getpid(), flush=True)
        else:
            sys.exit()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(receipt_of(folder))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
    assert living_holder(lock_folder_of(receipt_of(folder))) is None
    released = lock_folder_of(receipt_of(folder)) / "epoch-000001.released"
    assert "unix" in json.loads(released.read_text()), "given back when its process has ended"

"""Who holds a lease, by what lies in its folder; how it is kept and given back."""

from __future__ import annotations

import dataclasses
import errno
import getpass
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.lease_holders import elsewhere, plant
from tests.support.rejections import rejected
from tests.support.system_calls import Calls

from posttrain.store import lease as lease_module
from posttrain.store.lease import (
    HEARTBEAT_DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    check_epoch,
    heartbeat_age_seconds,
    living_holder,
    read_holder,
)
from posttrain.store.processes import process_ids, started_ticks

# ---- who is alive ----


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def test_what_is_written_about_a_holder(tmp_path: Path) -> None:
    before = time.time()
    with Lease(tmp_path, tmp_path / "lease", job="slurm:7") as lease:
        row = json.loads((tmp_path / "lease" / "epoch-000001.json").read_text())
        assert lease.folder == tmp_path / "lease"
    assert before - 0.001 <= row.pop("since_unix") <= time.time() + 0.001
    assert row == {
        "epoch": 1,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "process_ids": process_ids(),
        "started_ticks": started_ticks(os.getpid()),
        "user": getpass.getuser(),
        "job": "slurm:7",
    }
    assert sorted(os.listdir(tmp_path / "lease")) == [
        *("epoch-000001.heartbeat", "epoch-000001.json", "epoch-000001.released"),
    ]


def test_a_lease_that_is_not_held_has_no_epoch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not held"):
        _ = Lease(tmp_path, tmp_path / "lease").epoch


def test_in_messages_a_holder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    told = "process 7 on elsewhere (user ada, since 1970-01-01 00:01:00)"
    assert str(elsewhere(since_unix=60.0)) == told
    assert str(elsewhere(since_unix=60.0, job="slurm:3")) == told.replace(" (user", " in slurm:3 (user")
    assert str(elsewhere(since_unix=60.0, user="\x1b[2J")) == told.replace("ada", "\\x1b[2J")


@pytest.mark.parametrize("job", ["", "slurm:1"])
def test_a_living_holder_on_this_host_keeps_others_out_of_the_same_job_too(tmp_path: Path, job: str) -> None:
    """Two commands of one allocation: only on another node is it a later run of the job."""
    alive = elsewhere(
        host=os.uname().nodename, process_ids=process_ids(), pid=os.getpid(), started_ticks=started_ticks(os.getpid())
    )
    plant(tmp_path / "lease", dataclasses.replace(alive, job=job), heartbeat_unix=1.0)
    with pytest.raises(LeaseHeldError, match=f"is being written by process {os.getpid()} on"):
        Lease(tmp_path, tmp_path / "lease", job, lambda asked: False).__enter__()
    assert living_holder(tmp_path / "lease", lambda asked: False).pid == os.getpid()
    assert sorted(os.listdir(tmp_path / "lease")) == ["epoch-000001.heartbeat", "epoch-000001.json"]


def test_the_same_job_on_another_node_is_its_next_run(tmp_path: Path) -> None:
    plant(tmp_path / "lease", elsewhere(job="slurm:1"), heartbeat_unix=time.time())
    with pytest.raises(LeaseHeldError):
        Lease(tmp_path, tmp_path / "lease", "").__enter__()
    with Lease(tmp_path, tmp_path / "lease", "slurm:1") as lease:
        assert lease.epoch == 2


@pytest.mark.parametrize("change", [{"pid": 2**22 + 7}, {"started_ticks": 1}])
def test_where_ids_mean_the_same_the_process_decides_and_not_its_heartbeat(tmp_path: Path, change: dict) -> None:
    alive = elsewhere(
        host=os.uname().nodename, process_ids=process_ids(), pid=os.getpid(), started_ticks=started_ticks(os.getpid())
    )
    plant(tmp_path / "lease", alive, heartbeat_unix=1.0)
    assert living_holder(tmp_path / "lease") == alive
    plant(tmp_path / "lease", dataclasses.replace(alive, **change), heartbeat_unix=time.time())
    assert living_holder(tmp_path / "lease") is None


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"process_ids": "another container"}])
def test_where_ids_mean_something_else_the_heartbeat_decides(tmp_path: Path, change: dict) -> None:
    mine = elsewhere(
        host=os.uname().nodename, process_ids=process_ids(), pid=os.getpid(), started_ticks=started_ticks(os.getpid())
    )
    plant(tmp_path / "lease", dataclasses.replace(mine, **change), heartbeat_unix=1.0)
    assert living_holder(tmp_path / "lease") is None


@pytest.mark.parametrize(("silent_seconds", "is_alive"), [(-5, True), (0, True), (120, True), (121, False)])
def test_after_how_long_a_silence_a_holder_elsewhere_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_seconds: int, is_alive: bool
) -> None:
    assert (lease_module.HEARTBEAT_SECONDS, HEARTBEAT_DEAD_SECONDS) == (5, 120)
    holder = elsewhere()
    plant(tmp_path / "lease", holder, heartbeat_unix=1_000_000)
    monkeypatch.setattr(lease_module.time, "time", lambda: 1_000_000.0 + silent_seconds)
    assert heartbeat_age_seconds(tmp_path / "lease", holder) == silent_seconds
    assert (living_holder(tmp_path / "lease") is not None) == is_alive


def test_without_a_heartbeat_a_holder_elsewhere_is_dead(tmp_path: Path) -> None:
    plant(tmp_path / "lease", elsewhere())
    assert heartbeat_age_seconds(tmp_path / "lease", elsewhere()) == float("inf")
    assert living_holder(tmp_path / "lease") is None


def test_what_was_given_back_has_no_holder(tmp_path: Path) -> None:
    plant(tmp_path / "lease", elsewhere(), heartbeat_unix=time.time())
    (tmp_path / "lease" / "epoch-000001.released").touch()
    assert living_holder(tmp_path / "lease") is None
    assert read_holder(tmp_path / "lease") == elsewhere()


@pytest.mark.parametrize(
    ("epochs", "highest"), [([], None), ([9, 10], 10), ([999_999, 1_000_000], 1_000_000), ([2, 1], 2)]
)
def test_the_highest_epoch_counts(tmp_path: Path, epochs: list[int], highest: int | None) -> None:
    (tmp_path / "lease").mkdir()
    for epoch in epochs:
        plant(tmp_path / "lease", elsewhere(epoch))
    (tmp_path / "lease" / "epoch-zzz.json").touch()
    (tmp_path / "lease" / "epoch-000001.json.bak").touch()
    found = read_holder(tmp_path / "lease")
    assert (found and found.epoch) == highest
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == (highest or 0) + 1
        assert read_holder(tmp_path / "lease").epoch == lease.epoch


def test_who_may_still_write(tmp_path: Path) -> None:
    with pytest.raises(LeaseLostError, match="epoch 1 was superseded by None"):
        check_epoch(tmp_path / "lease", 1)
    plant(tmp_path / "lease", elsewhere(2))
    check_epoch(tmp_path / "lease", 2)
    for other in (1, 3):
        with pytest.raises(LeaseLostError, match=f"epoch {other} was superseded by process 7 on elsewhere"):
            check_epoch(tmp_path / "lease", other)


def test_a_lease_that_cannot_be_read_is_not_free(tmp_path: Path) -> None:
    (tmp_path / "lease").touch()
    with pytest.raises(NotADirectoryError):
        read_holder(tmp_path / "lease")
    with pytest.raises(NotADirectoryError):
        living_holder(tmp_path / "lease")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"epoch": 3}', json.dumps({**dataclasses.asdict(elsewhere(3)), "more": 1}), "\x80", "[" * 200_000]
    + [json.dumps(dataclasses.asdict(elsewhere(epoch, since_unix=since))) for epoch, since in ((3, 1e300), (4, 1.0))],
)
def test_what_is_no_lease_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease").mkdir()
    path = tmp_path / "lease" / "epoch-000003.json"
    path.write_bytes(content.encode("latin-1"))
    with rejected("lease-invalid", path) as refused:
        Lease(tmp_path, tmp_path / "lease").__enter__()
    assert f"remedy: delete {tmp_path / 'lease'} when" in str(refused.value)


# ---- taking it ----


def test_the_heartbeat_is_there_and_new_before_the_epoch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees the epoch must not take its holder for dead, also where somebody died just before he had it."""
    heartbeat, ages = tmp_path / "lease" / "epoch-000001.heartbeat", []
    heartbeat.parent.mkdir()
    heartbeat.touch()
    os.utime(heartbeat, (1.0, 1.0))

    def look(name: str, *paths: str) -> None:
        if name == "link":
            ages.append(time.time() - heartbeat.stat().st_mtime)

    calls = Calls(monkeypatch, look)
    with Lease(tmp_path, tmp_path / "lease"):
        pass
    assert len(ages) == 1
    assert ages[0] < 5
    assert ("fsync", str(tmp_path / "lease")) in calls.made


def test_no_heartbeat_is_given_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "epoch-000001.heartbeat").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Lease(tmp_path, tmp_path / "lease").__enter__()
    assert not (tmp_path / "victim").exists()


@pytest.mark.usefixtures("quick")
def test_a_link_in_the_place_of_a_heartbeat_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    os.utime(victim, (1.0, 1.0))
    with Lease(tmp_path, tmp_path / "lease") as lease:
        heartbeat = lease.folder / "epoch-000001.heartbeat"
        heartbeat.unlink()
        heartbeat.symlink_to(victim)
        os.utime(heartbeat, (1.0, 1.0), follow_symlinks=False)
        wait_for(lambda: heartbeat.lstat().st_mtime > 1.0)
    assert victim.stat().st_mtime == 1.0


def test_others_of_a_group_may_read_and_touch_a_heartbeat(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with Lease(tmp_path, tmp_path / "lease") as lease:
            assert (lease.folder / "epoch-000001.heartbeat").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_who_was_slower_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def another_is_faster(*places: Path) -> None:
        plant(tmp_path / "lease", elsewhere(1))
        link(*places)

    monkeypatch.setattr(os, "link", another_is_faster)
    with pytest.raises(LeaseHeldError, match=f"^{tmp_path}: another process was faster"):
        Lease(tmp_path, tmp_path / "lease").__enter__()
    assert read_holder(tmp_path / "lease") == elsewhere(1)


# ---- keeping it ----


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every hundredth of a second."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_the_heart_beats_until_the_end(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as lease:
        heartbeat = lease.folder / "epoch-000001.heartbeat"
        for _ in range(3):
            os.utime(heartbeat, (1.0, 1.0))
            wait_for(lambda: heartbeat.stat().st_mtime > 1.0)
        check_epoch(lease.folder, lease.epoch)
    time.sleep(0.1)
    os.utime(heartbeat, (1.0, 1.0))
    time.sleep(0.1)
    assert heartbeat.stat().st_mtime == 1.0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT])
def test_an_error_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    utime, tried, is_broken = os.utime, [], [False]

    def touch(*arguments: object, **more: object) -> None:
        if is_broken[0] and Path(arguments[0]).is_relative_to(tmp_path):
            tried.append(arguments)
            raise OSError(number, os.strerror(number))
        utime(*arguments, **more)

    monkeypatch.setattr(os, "utime", touch)
    with caplog.at_level(logging.WARNING), Lease(tmp_path, tmp_path / "lease") as lease:
        heartbeat = lease.folder / "epoch-000001.heartbeat"
        for time_of_it in (1, 2):
            is_broken[0] = True
            wait_for(lambda: len(tried) >= 5)
            utime(heartbeat, (1.0, 1.0))
            is_broken[0] = False
            wait_for(lambda: heartbeat.stat().st_mtime > 1.0)
            tried.clear()
            told = f"no heartbeat in {lease.folder}, it is tried again: [Errno {number}] {os.strerror(number)}"
            assert [row.getMessage() for row in caplog.records] == [told] * time_of_it, "once for each time"
        check_epoch(lease.folder, 1)


@pytest.mark.usefixtures("quick")
def test_a_lease_that_was_deleted_is_lost_and_not_made_anew(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as lease:
        shutil.rmtree(lease.folder)
        time.sleep(0.1)
        assert not lease.folder.exists()
        with pytest.raises(LeaseLostError):
            check_epoch(lease.folder, lease.epoch)
        lease.folder.mkdir()
        time.sleep(0.1)
        assert os.listdir(lease.folder) == []
    assert os.listdir(lease.folder) == []


def test_who_does_not_want_to_wait_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_sleep(seconds: float) -> None:
        raise AssertionError(f"sleeps {seconds} s")

    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(time, "sleep", must_not_sleep)
    plant(tmp_path / "lease", elsewhere(), heartbeat_unix=time.time())
    with pytest.raises(LeaseHeldError), Lease(tmp_path, tmp_path / "lease"):
        pass


def test_who_waits_looks_again_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def monotonic() -> float:
        now[0] += 1e-3
        return now[0]

    mine, really_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.get_ident() != mine:  # the worker's own
            really_sleep(seconds)
            return
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(time, "sleep", sleep)
    plant(tmp_path / "lease", elsewhere(), heartbeat_unix=time.time())
    with pytest.raises(LeaseHeldError), Lease(tmp_path, tmp_path / "lease", wait_seconds=HEARTBEAT_SECONDS + 0.5):
        pass
    assert slept == [HEARTBEAT_SECONDS, pytest.approx(0.5, abs=0.01)]


# ---- giving it back ----


def test_only_ones_own_epoch_is_given_back(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as lease:
        plant(lease.folder, elsewhere(2), heartbeat_unix=time.time())
    assert list(lease.folder.glob("*.released")) == []
    assert living_holder(lease.folder) == elsewhere(2)


def test_a_lease_that_cannot_be_given_back_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk: what has ended the work is what the user must hear."""
    (tmp_path / "lease" / "epoch-000001.released").mkdir(parents=True)
    with pytest.raises(ValueError, match="the cause"), Lease(tmp_path, tmp_path / "lease"):
        raise ValueError("the cause")
    assert f"the lease on {tmp_path} could not be given back: [Errno 21] Is a directory" in caplog.text
    caplog.clear()
    (tmp_path / "other" / "epoch-000001.released").mkdir(parents=True)
    with Lease(tmp_path, tmp_path / "other"):
        pass
    assert "could not be given back" in caplog.text

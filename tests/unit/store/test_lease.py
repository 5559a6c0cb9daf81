"""The lease on a run folder, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from posttrain.store import lease as lease_module
from posttrain.store.lease import (
    HEARTBEAT_DEAD_SECONDS,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    check_epoch,
    read_holder,
)

HOLD = """
    import sys, time
    from pathlib import Path
    from posttrain.store.lease import Lease
    with Lease(Path(sys.argv[1]), Path(sys.argv[1]) / "lease") as lease:
        print(lease.epoch, flush=True)
        time.sleep(float(sys.argv[2]))
"""


def start_holder(run_folder: Path, seconds: float = 60) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(run_folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def held_on(root: Path, host: str, job: str = "") -> Path:
    """Leave a lease as a holder on another host has it; returns its folder."""
    with Lease(root, root / "lease", job) as lease:
        folder = lease.folder
    (folder / "epoch-000001.released").unlink()
    row = json.loads((folder / "epoch-000001.json").read_text())
    (folder / "epoch-000001.json").write_text(json.dumps({**row, "host": host}))
    return folder


def test_epochs_rise_and_a_released_lease_is_free(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as first:
        assert first.epoch == 1
        check_epoch(first.folder, 1)
    with Lease(tmp_path, tmp_path / "lease") as second:
        assert second.epoch == 2


def test_when_it_was_given_back(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert not (lease.folder / "epoch-000001.released").exists()
        before = time.time()
    assert before <= json.loads((lease.folder / "epoch-000001.released").read_text())["unix"] <= time.time()


def test_a_living_holder_keeps_others_out(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        assert holder.stdout.readline().strip() == "1"
        with pytest.raises(RuntimeError, match=f"process {holder.pid}"), Lease(tmp_path, tmp_path / "lease"):
            pass
        check_epoch(tmp_path / "lease", 1)
    finally:
        holder.kill()
        holder.wait()


def test_a_killed_holder_is_succeeded_and_fenced(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    assert holder.stdout.readline().strip() == "1"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 2
        with pytest.raises(LeaseLostError):
            check_epoch(lease.folder, 1)


def test_a_reused_process_id_is_not_the_holder(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "lease") as lease:
        folder = lease.folder
    (folder / "epoch-000001.released").unlink()
    path = folder / "epoch-000001.json"
    row = json.loads(path.read_text())
    assert row["pid"] == os.getpid()
    path.write_text(json.dumps({**row, "started_ticks": row["started_ticks"] - 100}))
    with Lease(tmp_path, tmp_path / "lease") as second:
        assert second.epoch == 2


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that is too old is watched for a moment."""
    monkeypatch.setattr(lease_module, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)


@pytest.mark.usefixtures("short_watch")
def test_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    folder = held_on(tmp_path, "elsewhere")
    heartbeat = folder / "epoch-000001.heartbeat"
    heartbeat.touch()
    with pytest.raises(RuntimeError, match="elsewhere"), Lease(tmp_path, tmp_path / "lease"):
        pass
    silent_since = time.time() - HEARTBEAT_DEAD_SECONDS - 1
    os.utime(heartbeat, (silent_since, silent_since))
    with Lease(tmp_path, tmp_path / "lease") as second:
        assert second.epoch == 2


@pytest.mark.parametrize(
    ("job", "is_alive", "is_free"),
    [("slurm:2", True, False), ("slurm:2", False, True), ("slurm:2", None, False), ("slurm:1", True, True)],
)
def test_a_holder_in_a_job_is_judged_by_its_scheduler(
    tmp_path: Path, job: str, is_alive: bool | None, is_free: bool
) -> None:
    """Its next run takes over at once; for others the scheduler's word counts, and the heartbeat where it has none."""
    held_on(tmp_path, "elsewhere", job="slurm:1")
    with contextlib.nullcontext() if is_free else pytest.raises(LeaseHeldError, match="in slurm:1"):  # noqa: SIM117
        with Lease(tmp_path, tmp_path / "lease", job, lambda asked: is_alive if asked == "slurm:1" else None) as second:
            assert second.epoch == 2


@pytest.mark.usefixtures("short_watch")
def test_who_comes_in_a_dead_ones_place_waits_for_its_last_heartbeat(tmp_path: Path) -> None:
    folder = held_on(tmp_path, "a-pod-that-is-gone")
    almost_dead = time.time() - HEARTBEAT_DEAD_SECONDS + 2
    os.utime(folder / "epoch-000001.heartbeat", (almost_dead, almost_dead))
    with pytest.raises(RuntimeError, match="a-pod-that-is-gone"), Lease(tmp_path, tmp_path / "lease", wait_seconds=1):
        pass
    with Lease(tmp_path, tmp_path / "lease", wait_seconds=20) as second:
        assert second.epoch == 2


def test_of_many_at_once_exactly_one_wins(tmp_path: Path) -> None:
    contenders = [start_holder(tmp_path, seconds=3) for _ in range(4)]
    outputs = [contender.communicate() for contender in contenders]
    won = [out.strip() for (out, _), contender in zip(outputs, contenders, strict=True) if contender.returncode == 0]
    assert won == ["1"]
    assert read_holder(tmp_path / "lease").epoch == 1


def test_a_lease_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NFS: the link is made, the answer is lost, and the repeated request finds the name taken."""
    link = os.link

    def link_twice(*places: Path) -> None:
        link(*places)
        link(*places)

    monkeypatch.setattr(os, "link", link_twice)
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 1
        assert read_holder(tmp_path / "lease").pid == os.getpid()


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    assert holder.stdout.readline().strip() == "1"
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{holder.pid}").exists()
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 2
    holder.communicate()


def test_the_first_lease_of_a_run_makes_its_folders(tmp_path: Path) -> None:
    with Lease(tmp_path, tmp_path / "results" / "run" / "lease") as lease:
        check_epoch(lease.folder, 1)


def test_a_heartbeat_keeps_no_process_alive(tmp_path: Path) -> None:
    """One that ends without giving its lease back, as by an error in another thread."""
    program = "import sys; from pathlib import Path; from posttrain.store.lease import Lease\n"
    program += "Lease(Path(sys.argv[1]), Path(sys.argv[1])).__enter__()"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=30)

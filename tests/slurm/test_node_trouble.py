"""Nodes and disks that live on and do not work, on a real SLURM: the bits of the undisturbed run."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.disturbed_run import DisturbedRun
from tests.support.fault_record import FaultRecord
from tests.support.power_cut import Disk
from tests.support.slurm_cluster import Cluster
from tests.support.workflow_runs import WorkflowFolder

pytestmark = [pytest.mark.faults("nodes"), pytest.mark.timeout(1800)]

Disturb = Callable[..., DisturbedRun]
ROLLING_OUT = "rollouts/step_000001/chunk_0000.json"
SAVING = "checkpoints/step_000002.partial"
STALL_SECONDS = 60.0
# A fifth of a core.
QUOTA_MICROSECONDS, PERIOD_MICROSECONDS = 4_000, 20_000


def test_a_wiped_disk_and_a_killed_rank(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    """The copy is made anew; the next step begins no later than three plain starts after the kill."""
    run = disturb()
    for rank, point in ((1, "rollouts/step_000000/chunk_0000.json"), (0, ROLLING_OUT)):
        run.reach(point)
        node = run.nodes[rank]
        run.happens(f"local disk wiped under rank {rank}, then the rank killed")
        cluster.wipe(node)
        run.rank(rank).kill()
        run.wait_for_next_attempt()
    run.finish()
    run.check(one_machine, faults)
    for rank, row in zip((1, 0), run.rows(), strict=False):
        assert f"on {row['nodes'][rank]}: trainer rank {rank} was ended by SIGKILL" in row["reason"]
    slowest = max(map(run.recovery_seconds, run.events))
    faults.rows[-1] |= {"recovery_seconds": slowest, "plain_start_seconds": run.plain_start_seconds()}
    assert slowest <= 3 * run.plain_start_seconds()


def test_a_full_local_disk(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    cluster.call_on("n1", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/local_nvme")
    try:
        run = disturb()
        run.reach("attempts/001")
        run.happens("local disk full while staging")
        output = run.fail()
    finally:
        cluster.call_on("n1", "umount", "--lazy", "/local_nvme")
    assert "on n1" in output
    assert "not enough disk space for the copy to /local_nvme/posttrain/n1" in output
    run.start_driver()
    run.finish()
    run.check(one_machine, faults)


def test_a_full_shared_disk(
    disturb: Disturb, one_machine: WorkflowFolder, shared_disk: Disk, tmp_path: Path, faults: FaultRecord
) -> None:
    """The results lie on it; what could not be written is named, and when there is room training goes on."""
    folder = tmp_path / "on_slurm"
    folder.mkdir()
    (shared_disk.folder / "results").mkdir()
    (folder / "results").symlink_to(shared_disk.folder / "results")
    run = disturb(folder=folder)
    run.reach(ROLLING_OUT)
    run.happens("shared disk full while rolling out")
    with filled(shared_disk.folder / "ballast"):
        output = run.fail()
    assert "the disk is full" in output
    assert "remedy: free some space there" in output
    run.start_driver()
    run.finish()
    run.check(one_machine, faults)


def test_a_shared_disk_that_stands_still(
    disturb: Disturb, one_machine: WorkflowFolder, shared_disk: Disk, faults: FaultRecord
) -> None:
    """Nobody can write for a minute; nothing is taken for dead, and nothing starts again."""
    run = disturb(folder=shared_disk.folder / "on_slurm")
    for moment, point in (("rolling out", ROLLING_OUT), ("saving", SAVING)):
        run.reach(point)
        run.happens(f"shared disk stalled for {STALL_SECONDS:g} s while {moment}")
        with frozen(shared_disk.folder):
            time.sleep(STALL_SECONDS)
    run.finish()
    run.check(one_machine, faults)
    (done,) = run.rows()
    assert done["reason"] == "done"


def test_a_rank_that_stands_still(disturb: Disturb, one_machine: WorkflowFolder, faults: FaultRecord) -> None:
    """It is named within two minutes, with the collective in which the other waits; in the first step, too."""
    run = disturb()
    for rank, point in ((1, "rollouts/step_000000/chunk_0000.json"), (0, "rollouts/step_000003/chunk_0000.json")):
        run.reach(point)
        run.happens(f"rank {rank} stopped")
        run.rank(rank).suspend()
        run.wait_for_next_attempt()
    run.finish()
    run.check(one_machine, faults)
    *hung, done = run.rows()
    assert done["reason"] == "done"
    for row, event, rank in zip(hung, run.events, (1, 0), strict=True):
        assert row["reason"].startswith("training hangs: ")
        assert f"rank {rank} on {row['nodes'][rank]} does not answer" in row["reason"]
        assert row["ended_unix"] - event.unix < 120
    faults.rows[-1]["named_seconds"] = max(r["ended_unix"] - e.unix for r, e in zip(hung, run.events, strict=True))


@pytest.mark.parametrize("rank", [1, 0])
def test_a_slow_rank(disturb: Disturb, one_machine: WorkflowFolder, faults: FaultRecord, rank: int) -> None:
    """Slow from the first step on, it is named before the fourth."""
    run = disturb()
    run.reach("rollouts/step_000000/chunk_0000.json")
    run.happens(f"rank {rank} five times slower")
    with slowed(run.rank(rank)):
        run.finish()
    run.check(one_machine, faults)
    (done,) = run.rows()
    log = (run.attempts[0] / "trainer0.log").read_text()
    assert f"rank {rank} on {done['nodes'][rank]} computes" in log
    assert f"rank {1 - rank} on" not in log


@contextlib.contextmanager
def filled(path: Path) -> Iterator[None]:
    """Leave no room in a file system, what only root may use included."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 1024):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Let everybody wait who writes to a file system."""
    subprocess.run(["fsfreeze", "--freeze", folder], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=True, timeout=60)


@contextlib.contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Let a process have a fifth of a core, in slices far shorter than what its speed is measured by."""
    has_v1 = Path("/sys/fs/cgroup/cpu").is_dir()
    group = Path("/sys/fs/cgroup/cpu" if has_v1 else "/sys/fs/cgroup", f"posttrain-slow-{process.pid}")
    group.mkdir()
    try:
        if has_v1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_MICROSECONDS))
        else:
            (group / "cpu.max").write_text(f"{QUOTA_MICROSECONDS} {PERIOD_MICROSECONDS}")
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
        psutil.wait_procs([process], timeout=60)
    finally:
        group.rmdir()

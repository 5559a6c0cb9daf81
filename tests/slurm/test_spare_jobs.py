"""Jobs of new spare nodes, on a real SLURM: submitted for each lost node, used, and never left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.slurm_cluster import Cluster
from tests.support.workflow_runs import ROOT

from posttrain.cluster.nodes import NodesLostError
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.plan.resolve import resolve

CHOICE = {
    "model": "tiny",
    "site": "slurm_localhost",
    "nodes": 2,
    "set": "site.network_interface=lo site.slurm.spare_nodes=1 parallel.pipeline_model_parallel_size=2",
}
HEAD = """
import json, signal, sys
from pathlib import Path
from posttrain.plan.resolve import resolve
from posttrain.cluster.slurm import SlurmAllocation
choice, root, job, names, folder = json.loads(sys.argv[1])
SlurmAllocation(job, names, resolve(choice, Path(root) / "config").config, Path(folder)).leave_out(names[1:2])
print("submitted", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def as_a_client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def job(cluster: Cluster) -> str:
    """A job on three nodes, two that train and a spare one."""
    cluster.wait_until_idle()
    shape = ("--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--exclusive", "--time=30", "--output=/dev/null")
    number = cluster.ask("sbatch", "--parsable", *shape, "--wrap=sleep 1200")
    cluster.wait_until(lambda: cluster.state(number) == "RUNNING")
    return number


def nodes_of(cluster: Cluster, job: str) -> list[str]:
    return cluster.ask("scontrol", "show", "hostnames", cluster.ask("squeue", "-h", "-j", job, "-o", "%N")).split()


def allocation(cluster: Cluster, job: str, folder: Path) -> SlurmAllocation:
    (folder / "attempts").mkdir(parents=True, exist_ok=True)
    return SlurmAllocation(job, nodes_of(cluster, job), resolve(CHOICE, ROOT / "config").config, folder)


def have_come(nodes: SlurmAllocation, count: int) -> bool:
    try:
        return len(nodes.choose(count)) == count
    except NodesLostError:
        return False


def test_each_lost_node_is_replaced_once(cluster: Cluster, job: str, tmp_path: Path) -> None:
    own, nodes = nodes_of(cluster, job), allocation(cluster, job, tmp_path / "tiny-1" / "train")
    nodes.leave_out(own[1:2])
    nodes.leave_out(own[1:2])
    (spare,) = set(cluster.jobs()) - {job}
    cluster.wait_until(lambda: have_come(nodes, 3))
    (new,) = set(nodes.choose(3)) - set(own)
    assert nodes.choose(3) == [own[0], own[2], new], "behind the job's own"
    shown = cluster.ask("scontrol", "show", "job", spare)
    assert "JobName=tiny-1-spare-" in shown
    assert "Requeue=0" in shown
    assert "TimeLimit=00:30:00" in shown or "TimeLimit=00:29:" in shown, "what is left of the training's"
    nodes.leave_out([new])
    cluster.wait_until(lambda: cluster.state(spare) == "CANCELLED")
    cluster.wait_until(lambda: have_come(nodes, 3))
    assert set(nodes.choose(3)).isdisjoint({own[1], new})
    nodes.scheduler.give_back()
    cluster.wait_until(lambda: cluster.jobs() == [job])


def test_another_runs_jobs_are_not_touched(cluster: Cluster, job: str, tmp_path: Path) -> None:
    """Not of a run of the same name in another folder; and what an earlier head has left is."""
    first, second = (allocation(cluster, job, tmp_path / user / "tiny-1" / "train") for user in ("a", "b"))
    first.leave_out([nodes_of(cluster, job)[1]])
    (of_first,) = set(cluster.jobs()) - {job}
    second.leave_out([nodes_of(cluster, job)[1]])
    (of_second,) = set(cluster.jobs()) - {job, of_first}
    allocation(cluster, job, tmp_path / "a" / "tiny-1" / "train").scheduler.give_back()
    cluster.wait_until(lambda: set(cluster.jobs()) == {job, of_second})
    second.scheduler.give_back()
    cluster.wait_until(lambda: cluster.jobs() == [job])


def test_a_head_that_is_ended_leaves_nothing(cluster: Cluster, job: str, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    (folder / "attempts").mkdir(parents=True)
    told = json.dumps([CHOICE, str(ROOT), job, nodes_of(cluster, job), str(folder)])
    head = subprocess.Popen([sys.executable, "-c", HEAD, told], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    assert head.stdout.readline() == "submitted\n"
    assert len(cluster.jobs()) == 2
    head.terminate()
    assert head.wait(60) == -signal.SIGTERM
    cluster.wait_until(lambda: cluster.jobs() == [job])


def test_it_ends_with_the_job_that_trains(cluster: Cluster, job: str, tmp_path: Path) -> None:
    """Also where nobody cancels it."""
    nodes = allocation(cluster, job, tmp_path / "train")
    nodes.leave_out(nodes_of(cluster, job)[1:2])
    cluster.wait_until(lambda: have_come(nodes, 3))
    (spare,) = set(cluster.jobs()) - {job}
    cluster.ask("scancel", job)
    cluster.wait_until(lambda: not cluster.jobs())
    assert cluster.state(spare) == "COMPLETED"

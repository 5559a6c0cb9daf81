"""Nodes whose power is cut at every stage, on a real SLURM: the bits of the undisturbed run."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.disturbed_run import TWO_RANKS, DisturbedRun
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import check_claims, files_made, start
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import WorkflowFolder

from posttrain.store.lease import read_holder

pytestmark = [pytest.mark.faults("nodes"), pytest.mark.timeout(1800)]

Disturb = Callable[..., DisturbedRun]
POINTS = {
    "rolling out": "rollouts/step_000001/chunk_0000.json",
    # The whole rollout is there.
    "training": "rollouts/step_000001/chunk_0001.json",
    "saving": "checkpoints/step_000002.partial",
}


def reach(run: DisturbedRun, moment: str) -> None:
    if moment == "staging":
        run.reach_staging()
    else:
        run.reach(POINTS[moment])


@pytest.mark.parametrize("moments", [("staging", "rolling out"), ("training", "saving")], ids="-".join)
def test_another_node_and_a_spare_one(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord, moments: tuple[str, ...]
) -> None:
    """Training goes on inside its allocation, with spare nodes in place of the lost ones."""
    for node in cluster.nodes:
        cluster.wipe(node)
    run, lost = disturb({"site.slurm.spare_nodes": 2}), []
    with ExitStack() as stack:
        for moment in moments:
            reach(run, moment)
            lost.append(run.nodes[1])
            run.happens(f"power cut while {moment}, spare nodes")
            stack.enter_context(cluster.without(lost[-1]))
            run.wait_for_next_attempt()
        run.finish()
    run.check(one_machine, faults)
    *cut, done = run.rows()
    assert [row["reason"] for row in cut] == [f"the supervisor of {node} is gone; lost: {node}" for node in lost]
    assert not set(lost) & set(done["nodes"])
    assert len({row["job"] for row in run.rows()}) == 1, "all in one allocation"


def test_another_node_and_a_new_spare_one(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    """The only spare node is used up and replaced through the queue; so a second lost node costs no requeue either."""
    run = disturb({"site.slurm.spare_nodes": 1})
    run.reach(POINTS["rolling out"])
    job, lost = run.job, [run.nodes[1]]
    run.happens("power cut while rolling out, the only spare node")
    with ExitStack() as stack:
        stack.enter_context(cluster.without(lost[0]))
        run.wait_for_next_attempt()
        (spare,) = set(cluster.jobs()) - {job}
        cluster.wait_until(lambda: cluster.state(spare) == "RUNNING")
        new = cluster.ask("squeue", "--noheader", "--jobs", spare, "--format", "%N")
        run.reach("rollouts/step_000002/chunk_0000.json")
        lost.append(run.nodes[1])
        run.happens("power cut while rolling out, a new spare node")
        stack.enter_context(cluster.without(lost[1]))
        run.finish()
        run.check(one_machine, faults)
        cluster.wait_until(lambda: not cluster.jobs())
    *cut, done = run.rows()
    assert [row["reason"] for row in cut] == [f"the supervisor of {node} is gone; lost: {node}" for node in lost]
    assert done["nodes"] == [cut[0]["nodes"][0], new]
    assert {row["job"] for row in run.rows()} == {f"slurm:{job}"}, "all in one job"
    assert cluster.state(spare) == "CANCELLED"


def test_the_node_that_only_engines_have(
    disturb: Disturb, workflow: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    """The spare node takes its place; the rank on the other node begins again, too."""
    one_rank = {"parallel.pipeline_model_parallel_size": 1}
    workflow.settings = TWO_RANKS | one_rank
    workflow.run("train")
    run = disturb(one_rank | {"engine.own_nodes": 1, "site.slurm.spare_nodes": 1})
    run.reach(POINTS["rolling out"])
    lost = run.nodes[1]
    run.happens("power cut while rolling out, the node that only engines have")
    with cluster.without(lost):
        run.wait_for_next_attempt()
        run.finish()
    run.check(workflow, faults)
    cut, done = run.rows()
    assert cut["reason"] == f"the supervisor of {lost} is gone; lost: {lost}"
    assert (done["nodes"][0], done["reason"]) == (cut["nodes"][0], "done")
    assert lost not in done["nodes"]
    logs = {path.name for path in run.attempts[-1].glob("[et]*.log")}
    assert {"trainer0.log", "engine0.log", "engine1.log"} <= logs


@pytest.mark.parametrize(
    ("spare_nodes", "moments"), [(0, ("staging", "training")), (1, ("rolling out", "saving"))], ids=["none", "spare"]
)
def test_the_first_node(
    disturb: Disturb,
    one_machine: WorkflowFolder,
    cluster: Cluster,
    faults: FaultRecord,
    spare_nodes: int,
    moments: tuple[str, ...],
) -> None:
    """The job goes back into the queue under its own number: by SLURM, or by a watchdog where it outlives its nodes."""
    for node in cluster.nodes:
        cluster.wipe(node)
    run = disturb({"site.slurm.spare_nodes": spare_nodes})
    for moment in moments:
        reach(run, moment)
        job = run.job
        run.happens(f"power cut while {moment}, first node")
        with cluster.without(run.nodes[0]):
            cluster.wait_until_queued(job)
        cluster.start_now(job)
        run.wait_for_next_attempt()
    run.finish()
    run.check(one_machine, faults)
    (done,) = run.rows()
    assert done["reason"] == "done"
    assert done["job"] == f"slurm:{job}"
    assert done["attempt"] == done["epoch"] == 3, "who is cut off writes no row"


def test_another_node_and_no_spare_one(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    run = disturb()
    run.reach(POINTS["rolling out"])
    job, lost = run.job, run.nodes[1]
    run.happens("power cut while rolling out, no spare node")
    with cluster.without(lost):
        # SLURM may start it again at once.
        cluster.wait_until(lambda: cluster.state(job) == "PENDING" or len(run.attempts) > 1)
        cluster.start_now(job)
        run.finish()
    run.check(one_machine, faults)
    *cut, done = run.rows()
    assert all(f"lost: {lost}" in row["reason"] for row in cut), "none where SLURM was faster than the head"
    assert done["job"] == f"slurm:{job}", "the same job, requeued"
    assert lost not in done["nodes"]
    assert done["attempt"] == done["epoch"] == 2


@pytest.mark.parametrize("part", ["torch_dist", "rollout_fp8"])
def test_a_node_that_converts(
    cluster: Cluster, store: Path, tmp_path: Path, faults: FaultRecord, part: str, bystanders: None
) -> None:
    """SLURM starts the steps of a lost node again, after two minutes, and the driver waits for them."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy, symlinks=True, ignore=shutil.ignore_patterns("torch_dist-*", "rollout_fp8-*"))
    workflow = SlurmFolder(tmp_path / "work", copy, environment=cluster.environment)
    started, leases = time.monotonic(), f"tiny/*/{part}-*.parts/*.lease"
    driver = start(workflow, "finalize_torch_dist", "finalize_rollout_fp8")
    driver.wait_until(lambda: any(map(read_holder, copy.glob(leases))))
    (holder, *_) = filter(None, map(read_holder, copy.glob(leases)))
    with cluster.without(holder.host):
        code, output = driver.finish(timeout=500)
    assert code == 0, output[-4000:]
    assert check_claims(workflow)
    assert files_made(workflow).items() <= files_made(WorkflowFolder(tmp_path, store)).items()
    faults.add_events(Counter([f"power cut while converting, {part}"]), time.monotonic() - started)
    faults.equal = True

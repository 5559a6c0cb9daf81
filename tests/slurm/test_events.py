"""What happens to training on a cluster: each event once, on a real SLURM, with the bits of the undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest
from tests.interruptions import TRAINER, Driver, assert_same_training, find_processes, start
from tests.slurm.cluster import Cluster
from tests.slurm.slurm_folder import SlurmFolder
from tests.workflow_runs import FAST, WorkflowFolder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

TWO_RANKS = FAST | {
    "parallel.pipeline_model_parallel_size": 2,
    "engine.num_engines": 2,
    "engine.num_threads": 1,
    "engine.groups_per_request": 2,
}
IN_FIRST_ROLLOUT = "rollouts/step_000000/chunk_0000.json"
FIRST_CHECKPOINT = "checkpoints/step_000002"


@pytest.fixture(scope="module")
def one_machine(store, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """The same layout and engines on one machine, undisturbed."""
    settings = TWO_RANKS | {"hardware.gpus_per_node": 2}
    workflow = WorkflowFolder(tmp_path_factory.mktemp("one_machine"), store, settings)
    workflow.run("train_grpo")
    return workflow


@pytest.fixture
def two_nodes(on_slurm: SlurmFolder) -> SlurmFolder:
    """Two nodes of one rank."""
    on_slurm.nodes, on_slurm.settings = 2, dict(TWO_RANKS)
    return on_slurm


def attempts_of(workflow: WorkflowFolder) -> list[dict]:
    return [json.loads(line) for line in (workflow.run_folder / "train" / "attempts.jsonl").read_text().splitlines()]


def rank_process(workflow: WorkflowFolder, rank: int) -> psutil.Process:
    (found,) = (p for p in find_processes(workflow, TRAINER) if p.environ()["RANK"] == str(rank))
    return found


def finish(driver: Driver) -> str:
    code, output = driver.finish(timeout=500)
    assert code == 0, output[-4000:]
    return output


def finish_without(node: str, driver: Driver, cluster: Cluster) -> None:
    """Cut a node's power, and wait for the end all the same."""
    cluster.cut_power(node)
    try:
        finish(driver)
    finally:
        cluster.bring_back(node)


def test_a_killed_rank_and_a_lost_node(two_nodes: SlurmFolder, one_machine: WorkflowFolder, cluster: Cluster) -> None:
    """Training restarts inside its allocation, the second time on the spare node; a bystander on the nodes lives on."""
    two_nodes.settings |= {"site.slurm.spare_nodes": 1}
    bystander = subprocess.Popen(["bash", "-c", "exec -a posttrain.launch.node sleep 600"])
    driver = start(two_nodes, "train_grpo")
    driver.wait_for_file(IN_FIRST_ROLLOUT)
    rank_process(two_nodes, 1).kill()
    driver.wait_for_file(FIRST_CHECKPOINT)
    lost = attempts_of(two_nodes)[0]["nodes"][1]
    finish_without(lost, driver, cluster)
    assert_same_training(two_nodes, one_machine)
    killed, cut, done = attempts_of(two_nodes)
    assert f"on {lost}: trainer rank 1 was ended by SIGKILL" in killed["reason"]
    assert cut["reason"] == f"the supervisor of {lost} is gone; lost: {lost}"
    assert done["reason"] == "done"
    assert lost not in done["nodes"]
    assert {row["job"] for row in (killed, cut, done)} == {killed["job"]}, "all in one allocation"
    assert bystander.poll() is None
    bystander.kill()


def test_a_driver_that_dies_and_a_job_whose_time_is_over(
    two_nodes: SlurmFolder, one_machine: WorkflowFolder, cluster: Cluster
) -> None:
    """The job goes on without its driver; the next one follows it, also through the queue, and trains nothing twice."""
    first = start(two_nodes, "train_grpo")
    first.wait_for_file(IN_FIRST_ROLLOUT)
    first.end(signal.SIGKILL)
    (job,) = cluster.jobs()
    cluster.ask("scancel", "--signal=USR1", job)
    cluster.wait_until_queued(job)
    second = start(two_nodes, "train_grpo")
    second.wait_until(lambda: len(cluster.jobs()) == 2)
    cluster.start_now(job)
    output = finish(second)
    assert "is being trained by process" in output
    assert f"in slurm:{job}" in output
    assert_same_training(two_nodes, one_machine)
    ended, done = attempts_of(two_nodes)
    assert "asked to end" in ended["reason"]
    assert done["reason"] == "done"
    assert ended["job"] == done["job"] == f"slurm:{job}"
    assert done["started_unix"] > ended["ended_unix"]


def test_a_stopped_rank_and_no_spare_node(
    two_nodes: SlurmFolder, one_machine: WorkflowFolder, cluster: Cluster
) -> None:
    """A rank that hangs is named with the collective in which the other waits; a job short of a node is requeued."""
    two_nodes.settings |= {"launch.hang_timeout_seconds": 30}
    driver = start(two_nodes, "train_grpo")
    driver.wait_for_file(IN_FIRST_ROLLOUT)
    rank_process(two_nodes, 1).suspend()
    driver.wait_for_file(FIRST_CHECKPOINT)
    (hung,) = attempts_of(two_nodes)
    lost = hung["nodes"][1]
    finish_without(lost, driver, cluster)
    assert_same_training(two_nodes, one_machine)
    hung, cut, done = attempts_of(two_nodes)
    assert hung["reason"].startswith("training hangs: ")
    assert f"rank 1 on {lost} does not answer" in hung["reason"]
    assert "rank 0 in " in hung["reason"]
    assert hung["ended_unix"] - hung["started_unix"] < 120
    assert f"lost: {lost}" in cut["reason"]
    assert done["reason"] == "done"
    assert done["job"] == cut["job"], "the same job, requeued"
    assert done["epoch"] > cut["epoch"]

"""The whole chain over a real SLURM: four nodes of two ranks each, with the bits of one machine."""

from __future__ import annotations

import json

import pytest
from tests.support.interruptions import assert_same_training, attempts_of
from tests.support.listening import RANK, assert_all_known, silent_sockets, watched_sockets
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.cluster.slurm_query import JOB_PREFIX

pytestmark = pytest.mark.slow

LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.expert_model_parallel_size": 2,
    "engine.num_engines": 4,
    "engine.num_threads": 1,
    "engine.groups_per_request": 1,
    "training.num_steps": 6,
}


@pytest.mark.faults("slow")
def test_four_nodes_have_the_bits_of_one(on_slurm: SlurmFolder, workflow: WorkflowFolder) -> None:
    """TP2 PP2 EP2 and DP2 over gloo, an engine on each node, from the staged copy on each node's disk to the report.

    Meanwhile another user tries every socket, in the network of each node.
    """
    on_slurm.settings = FAST | LAYOUT | {"hardware.gpus_per_node": 2}
    workflow.settings = FAST | LAYOUT | {"hardware.gpus_per_node": 8}
    with watched_sockets(on_slurm) as found:
        on_slurm.run()
    with watched_sockets(workflow) as on_one_machine:
        workflow.run("train")
    assert_same_training(on_slurm, workflow)
    train = on_slurm.run_folder / "train"
    (attempt,) = (json.loads(line) for line in (train / "attempts.jsonl").read_text().splitlines())
    assert (len(attempt["nodes"]), attempt["reason"]) == (4, "done")
    assert attempt["job"].startswith(JOB_PREFIX)
    for number, node in enumerate(attempt["nodes"]):
        assert f"/local_nvme/posttrain/{node}/" in (train / f"attempts/001/node-{node}.log").read_text()
        assert "ready on http://10." in (train / f"attempts/001/engine{number}.log").read_text()
    summary = on_slurm.summary
    assert summary["num_steps"] == 6
    assert 0 < summary["pass_rate_after"] < 1
    assert (on_slurm.run_folder / "report.html").exists()
    and_the_meeting = len(silent_sockets(on_one_machine)) + 1
    assert_all_known(found, and_the_meeting, addresses=r"127\.0\.0\.1|10\.77\.0\.\d+")
    assert {"posttrain.rl.engines.embedded", "train.py", RANK, "srun"} <= {at.program for at in found}
    on_slurm.nodes = 2
    assert "train tiny" not in on_slurm.run(), "what is trained stays trained, whatever the nodes"


@pytest.mark.faults("slow")
def test_trainer_and_engines_take_turns_on_two_nodes(
    on_slurm: SlurmFolder, workflow: WorkflowFolder, cluster: Cluster
) -> None:
    """Nodes whose disks are empty copy what their ranks load, and no weights for engines."""
    for node in cluster.nodes:
        cluster.wipe(node)
    turns = {"engine.sleep": "always", "engine.num_engines": 2, "engine.num_threads": 1, "engine.groups_per_request": 1}
    on_slurm.nodes, on_slurm.settings = 2, FAST | turns | {"hardware.gpus_per_node": 1}
    workflow.settings = FAST | turns | {"hardware.gpus_per_node": 2}
    on_slurm.run("train")
    workflow.run("train")
    assert_same_training(on_slurm, workflow)
    (attempt,) = attempts_of(on_slurm)
    for node in attempt["nodes"]:
        log = (on_slurm.run_folder / f"train/attempts/001/node-{node}.log").read_text()
        assert f"the copy to /local_nvme/posttrain/{node}/" in log

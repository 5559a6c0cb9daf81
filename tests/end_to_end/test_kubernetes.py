"""Whole trainings over a Kubernetes API server on loopback, whose pods are processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.interruptions import assert_gone, assert_same_training, attempts_of, rank_process, start
from tests.support.kubernetes_server import KubernetesServer
from tests.support.workflow_runs import FAST, ROOT, WorkflowFolder

pytestmark = pytest.mark.slow

TWO_RANKS = FAST | {
    "launch.preflight": "false",
    "parallel.pipeline_model_parallel_size": 2,
    "engine.num_engines": 2,
    "engine.num_threads": 1,
    "training.num_steps": 3,
    "trainer.save_interval": 1,
}


@dataclass
class PodFolder(WorkflowFolder):
    """A working directory whose training and evaluations run in pods.

    Args:
        nodes: Of training.
    """

    nodes: int = 1

    def command(self, *targets: str, **arguments) -> list[str]:
        return super().command(*targets, config={"nodes": self.nodes}, **arguments)


def folder_of_pods(server: KubernetesServer, store: Path, settings: dict[str, object], nodes: int) -> PodFolder:
    folder = server.folder
    pods = {
        "site.launcher": "kubernetes",
        "site.node_names": "[]",
        "site.node_local": folder / "node_local",
        "site.kubernetes.image": "registry.example/posttrain:0.2.0",
        "site.kubernetes.volumes": f"['{folder}=pvc:shared','{ROOT}=pvc:code','{store}=pvc:store']",
    }
    return PodFolder(folder / "pods", store, settings | pods, {"KUBECONFIG": str(server.kubeconfig)}, nodes)


@pytest.mark.faults("slow")
def test_pods_give_the_bits_of_this_machine(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    with KubernetesServer(tmp_path) as server:
        run = folder_of_pods(server, undisturbed.store, FAST, nodes=1)
        run.run()
    owners = {made["metadata"]["annotations"]["posttrain/run-folder"] for made in server.created}
    logs = {path.relative_to(run.folder / "logs").parts[0] for path in run.folder.glob("logs/*/*.node0.log")}
    assert owners == {str(run.run_folder)}
    assert len(server.jobsets) == len(server.created) == 3, "training, and the evaluations before and after it"
    assert logs == {"train", "evaluate"}, "each node's log lies beside the rule's"
    assert run.metrics() == undisturbed.metrics()
    same = ("final_weights_sha256", "pass_rate_before", "pass_rate_after")
    assert [run.summary[name] for name in same] == [undisturbed.summary[name] for name in same]


@pytest.mark.faults("slow")
def test_two_pods_that_lose_a_rank_and_then_a_pod(workflow: WorkflowFolder, tmp_path: Path) -> None:
    """Ranks start again inside the pods, a lost pod starts all pods again; the bits are those of one machine."""
    workflow.settings = TWO_RANKS | {"hardware.gpus_per_node": 2}
    workflow.run("train")
    with KubernetesServer(tmp_path) as server:
        run = folder_of_pods(server, workflow.store, TWO_RANKS, nodes=2)
        driver = start(run, "train")
        driver.wait_for_file("rollouts/step_000000/chunk_0000.json")
        rank_process(run, 1).kill()
        driver.wait_for_file("checkpoints/step_000001")
        (jobset,) = server.jobsets.values()
        assert jobset["status"]["restarts"] == 0
        server.kill_pod(f"{jobset['metadata']['name']}-nodes-0-1-00000")
        code, output = driver.finish()
        assert code == 0, output[-4000:]
        assert_gone(run)
    assert jobset["status"]["restarts"] == 1
    assert_same_training(run, workflow)
    killed, lost, done = attempts_of(run)
    assert "on node-1: trainer rank 1 was ended by SIGKILL" in killed["reason"]
    assert (lost["attempt"], lost["reason"]) == (2, "the supervisor was killed"), "with its pods"
    assert (killed["attempt"], killed["epoch"], done["attempt"], done["epoch"]) == (1, 1, 3, 2)
    assert (done["reason"], done["nodes"]) == ("done", ["node-0", "node-1"])

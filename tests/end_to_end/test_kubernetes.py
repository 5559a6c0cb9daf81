"""The whole training over a Kubernetes API server on loopback, whose pods are processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kubernetes_server import KubernetesServer
from tests.workflow_runs import FAST, ROOT, WorkflowFolder

pytestmark = pytest.mark.slow


def test_a_training_in_a_pod_has_the_bits_of_one_on_this_machine(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    pods = {
        "site.launcher": "kubernetes",
        "site.node_names": "[]",
        "site.node_local": tmp_path / "node_local",
        "site.kubernetes.image": "registry.example/posttrain:0.1.0",
        "site.kubernetes.volumes": f"['{tmp_path}=pvc:shared','{ROOT}=pvc:code','{undisturbed.store}=pvc:store']",
    }
    with KubernetesServer(tmp_path) as server:
        environment = {"KUBECONFIG": str(server.kubeconfig)}
        run = WorkflowFolder(tmp_path / "work", undisturbed.store, FAST | pods, environment)
        done = run.results / undisturbed.run_folder.name / "train" / "done.json"
        run.run(str(done))
    (jobset,) = server.created
    assert jobset["metadata"]["annotations"]["posttrain/run-folder"] == str(run.run_folder)
    assert run.metrics() == undisturbed.metrics()
    assert done.read_text() == (undisturbed.run_folder / "train" / "done.json").read_text(), "the hash of every file"
    assert list((run.folder / "logs" / "train_grpo").glob("*.node0.log")), "each node's log lies beside the rule's"

"""The whole chain over a Kubernetes API server on loopback, whose pods are processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kubernetes_server import KubernetesServer
from tests.workflow_runs import FAST, ROOT, WorkflowFolder

pytestmark = pytest.mark.slow


def test_pods_give_the_bits_of_this_machine(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
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
        run.run()
    owners = {made["metadata"]["annotations"]["posttrain/run-folder"] for made in server.created}
    logs = {path.relative_to(run.folder / "logs").parts[0] for path in run.folder.glob("logs/*/*.node0.log")}
    assert owners == {str(run.run_folder)}
    assert len(server.jobsets) == len(server.created) == 3, "training, and the evaluations before and after it"
    assert logs == {"train_grpo", "evaluate"}, "each node's log lies beside the rule's"
    assert run.metrics() == undisturbed.metrics()
    same = ("final_weights_sha256", "pass_rate_before", "pass_rate_after")
    assert [run.summary[name] for name in same] == [undisturbed.summary[name] for name in same]

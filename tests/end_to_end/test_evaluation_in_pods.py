"""An evaluation over two pods of a Kubernetes API server on loopback, which runs them as processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.test_kubernetes import folder_of_pods
from tests.end_to_end.test_sglang import architecture, model, prompts, settings  # noqa: F401 fixtures
from tests.support.evaluations import ON_ONE_NODE, TWO_RANKS, engine_logs, measured, target
from tests.support.interruptions import assert_gone
from tests.support.kubernetes_server import KubernetesServer
from tests.support.sglang_environment import require_sglang
from tests.support.workflow_runs import WorkflowFolder

pytestmark = [pytest.mark.faults("slow"), pytest.mark.sglang]


def test_an_engine_over_two_pods_answers_as_one_in_one_place(
    tmp_path: Path,
    settings: dict[str, object],  # noqa: F811
) -> None:
    require_sglang()
    settings |= TWO_RANKS
    with KubernetesServer(tmp_path) as server:
        in_pods = folder_of_pods(server, tmp_path / "store", settings, nodes=2)
        in_pods.run(target(in_pods))
    beside = WorkflowFolder(tmp_path / "beside", in_pods.store, settings | ON_ONE_NODE)
    beside.run(target(beside))
    assert measured(in_pods) == measured(beside)
    assert all(f"'node_rank': {rank}" in log for rank, log in enumerate(engine_logs(in_pods)))
    (jobset,) = server.created
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 2
    assert_gone(in_pods)

"""Evaluations with a real SGLang over two nodes of a real SLURM: two ranks, one on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.test_sglang import architecture, model, prompts, settings  # noqa: F401 fixtures
from tests.support.interruptions import assert_gone
from tests.support.sglang_environment import require_sglang
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.planner.resolve import resolve

pytestmark = [pytest.mark.faults("slow"), pytest.mark.sglang]

# An engine of two ranks; on CPUs SGLang wants to be told on which processor each is.
TWO_RANKS = {"engine.gpus_per_engine": 2, "site.engine_environment": "[SGLANG_CPU_OMP_THREADS_BIND=0|0]"}


@pytest.fixture
def asked(settings: dict[str, object]) -> dict[str, object]:  # noqa: F811
    require_sglang()
    few = {"rollout.max_response_tokens": 8, "evaluation.num_samples_per_prompt": 2}
    return settings | TWO_RANKS | few | {"engine.start_timeout_seconds": 600}


def target(workflow: WorkflowFolder) -> str:
    """Return the result before training; engines and nodes change no run's name."""
    asked = workflow.settings | {"hardware.gpus_per_node": 2}
    words = " ".join(f"{key}={value}" for key, value in asked.items())
    config = {"model": "tiny", "site": "local", "set": words}
    return str(workflow.results / resolve(config, ROOT / "config").run / "evaluation" / "before.json")


def measured(workflow: WorkflowFolder) -> dict[str, Any]:
    result = json.loads(Path(target(workflow)).read_text())
    del result["tokens_per_second"]
    return result


def test_an_engine_over_two_nodes_answers_as_one_on_one_node(
    cluster: Cluster, tmp_path: Path, asked: dict[str, object]
) -> None:
    beside = WorkflowFolder(tmp_path / "beside", tmp_path / "store", asked | {"hardware.gpus_per_node": 2})
    beside.run(target(beside))
    on_slurm = SlurmFolder(tmp_path / "on_slurm", beside.store, dict(asked), cluster.environment, nodes=2)
    output = on_slurm.run(target(on_slurm))
    assert "before training (2 nodes)" in output
    assert measured(on_slurm) == measured(beside)
    folder = Path(target(on_slurm)).with_suffix(".engines")
    logs = [(folder / f"node{rank}" / "engine0.log").read_text() for rank in (0, 1)]
    assert all(f"'node_rank': {rank}" in log for rank, log in enumerate(logs))
    assert_gone(on_slurm)

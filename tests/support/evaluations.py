"""Evaluations before training, of SGLang with two ranks; engines and nodes change no run's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.plan.resolve import resolve

# On CPUs SGLang wants to be told on which processor each rank is.
TWO_RANKS: dict[str, object] = {
    "engine.gpus_per_engine": 2,
    "engine.start_timeout_seconds": 600,
    "site.engine_environment": "[SGLANG_CPU_OMP_THREADS_BIND=0|0]",
    "rollout.max_response_tokens": 8,
    "evaluation.num_samples_per_prompt": 2,
}
ON_ONE_NODE: dict[str, object] = {"hardware.gpus_per_node": 2}


def target(workflow: WorkflowFolder) -> str:
    """Return the result."""
    settings = {key: value for key, value in workflow.settings.items() if not key.startswith("site.")} | ON_ONE_NODE
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    run = resolve({"model": "tiny", "site": "local", "set": words}, ROOT / "config").run
    return str(workflow.results / run / "evaluation" / "before.json")


def measured(workflow: WorkflowFolder) -> dict[str, Any]:
    """Return what is in the result, without how fast it was."""
    result = json.loads(Path(target(workflow)).read_text())
    del result["tokens_per_second"]
    return result


def engine_logs(workflow: WorkflowFolder) -> list[str]:
    """Return the logs of an engine over two nodes, by node."""
    folder = Path(target(workflow)).with_suffix(".engines")
    return [(folder / f"node{rank}" / "engine0.log").read_text() for rank in (0, 1)]

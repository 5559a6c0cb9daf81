"""A Qwen3 that the workflow makes learns the demo's task: grouped attention, an embedding that is the output matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow


@pytest.mark.faults("slow")
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_it_learns_from_the_reward_alone(seed: int, tmp_path: Path) -> None:
    """A fifth of the demo's steps: held-out prompts, before and after, of a model whose warm-up is over."""
    settings = {"data.seed": seed, "training.seed": seed, "training.num_steps": 16, "trainer.save_interval": 16}
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", settings)
    workflow.run(config={"model": "tiny_qwen3"})
    before, after = workflow.summary["pass_rate_before"], workflow.summary["pass_rate_after"]
    assert 0.05 <= before <= 0.35
    assert after >= before + 0.3

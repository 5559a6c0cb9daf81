"""Other families that the workflow makes learn the demo's task.

Qwen3: grouped attention, an embedding that is the output matrix. Qwen3.5: gated delta nets, a vision tower and an MTP
layer, which are exported bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader

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


@pytest.mark.faults("slow")
@pytest.mark.parametrize(("model", "check"), [("tiny_qwen3.5", "whole"), ("tiny_qwen3.5_moe", "layers")])
def test_a_model_with_a_vision_tower_learns_and_is_exported_with_it(model: str, check: str, tmp_path: Path) -> None:
    settings = {"training.num_steps": 8, "trainer.save_interval": 8, "export.check": check}
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", settings)
    workflow.run(config={"model": model})
    summary = workflow.summary
    assert summary["pass_rate_after"] >= summary["pass_rate_before"] + 0.2
    assert summary["mismatch_abs_diff_mean"] < 1e-6
    assert summary["export_check"]["check"] == check
    (config,) = (tmp_path / "store" / "made").glob("*/config.json")
    made, exported = CheckpointReader(config.parent), CheckpointReader(workflow.run_folder / "hf")
    assert made.names == exported.names
    changed = {name for name in made if not torch.equal(made.tensor(name), exported.tensor(name))}
    kept = {name for name in made if name.startswith(("model.visual.", "mtp."))}
    assert kept
    assert not kept & changed
    assert any(".linear_attn.A_log" in name for name in changed)

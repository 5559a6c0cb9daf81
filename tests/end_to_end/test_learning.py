"""The demo's model learns from its reward, and from nothing else: the same training with a reward that is constant.

That an update without a signal moves nothing stands in tests/unit/rl/megatron_backend/test_train_step.py, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.interruptions import training_state
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_UPDATES = 2, 4
LEARNING = FAST | {
    "training.num_steps": NUM_STEPS,
    "trainer.save_interval": NUM_STEPS,
    "trainer.mismatch_interval": 0,
    "rollout.rollout_batch_size": 16,
    "rollout.num_samples_per_prompt": 16,
    "training.global_batch_size": 128,
    "engine.groups_per_request": 16,
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.1,
}


def without_right_answers(store: Path, folder: Path) -> dict[str, object]:
    """Return the settings of the same prompts with labels that no response equals: every reward is 0."""
    (dataset,) = (path.parent for path in store.glob("datasets/sort_digits-*/train.jsonl"))
    folder.mkdir()
    settings: dict[str, object] = {"data.kind": "jsonl"}
    for part in ("train", "heldout"):
        rows = map(json.loads, (dataset / f"{part}.jsonl").read_text().splitlines())
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row | {"label": "never"}) + "\n" for row in rows))
        settings[f"data.{part}_file"] = folder / f"{part}.jsonl"
    return settings


# A trainer and an engine start, and 512 responses are sampled.
def test_the_reward_teaches(store: Path, tmp_path: Path) -> None:
    told = WorkflowFolder(tmp_path / "told", store, LEARNING)
    told.run("train")
    # Prompts are new in each step; of 256 responses the standard error is 0.03. One step takes the model from every
    # fourth try to every second; trained against its reward it gets none right.
    first, second = (row["rollout/pass_rate"] for row in told.metrics())
    assert second > first + 0.15


@pytest.mark.faults("slow")
def test_a_constant_reward_does_not(store: Path, tmp_path: Path) -> None:
    WorkflowFolder(tmp_path / "told", store, LEARNING).run("download_dataset")
    untold = WorkflowFolder(tmp_path / "untold", store, LEARNING | without_right_answers(store, tmp_path / "prompts"))
    untold.run("train")
    for row in untold.metrics():
        assert row["rollout/reward_std_zero_fraction"] == 1.0
        assert (row["rollout/reward_mean"], row["train/loss"], row["train/grad_norm"]) == (0.0, 0.0, 0.0)
        assert row["train/zero_advantage_updates"] == NUM_UPDATES / NUM_STEPS
    # Neither momentum nor weight decay moves what no sample asks to be moved.
    (torch_dist,) = (path.parent for path in store.glob("tiny/*/torch_dist-????????/.metadata"))
    before, after = TorchDistReader(torch_dist), training_state(untold, NUM_STEPS)
    weights = after.keys() & set(before.keys)
    assert len(weights) > 10
    for key in weights:
        assert torch.equal(after[key].float(), before.read(key).float()), key

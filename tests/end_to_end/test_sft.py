"""Supervised fine-tuning as a run: no engine, the same bits after a kill, and a model that RL begins with."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from tests.support.interruptions import assert_gone, assert_same_training, start
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.store import read_receipt

pytestmark = pytest.mark.slow

# As `recipe=sft` has it; two updates in each step.
SFT = FAST | {
    "training.objective": "sft",
    "training.num_steps": 6,
    "training.global_batch_size": 16,
    "algorithm.loss_aggregation": "token_mean",
    "rollout.rollout_batch_size": 32,
    "rollout.num_samples_per_prompt": 1,
    "rollout.fp8": "false",
    "optimizer.lr": 0.001,
}


@pytest.mark.faults("slow")
def test_a_killed_run_ends_with_the_same_bits_and_no_engine_is_started(store: Path, tmp_path: Path) -> None:
    straight, killed = (WorkflowFolder(tmp_path / name, store, dict(SFT)) for name in ("straight", "killed"))
    straight.run("train")
    rows = straight.metrics()
    assert rows[-1]["train/perplexity"] < 0.8 * rows[0]["train/perplexity"]
    assert not any(name.startswith(("mismatch/", "rollout/reward", "rollout/pass")) for name in rows[0])
    files = {path.name for path in (straight.run_folder / "train/attempts/001").iterdir()}
    assert "trainer0.log" in files
    assert not any(name.startswith("engine") for name in files)
    driver = start(killed, "train")
    driver.wait_for_file("checkpoints/step_000002")
    driver.end(signal.SIGKILL)
    assert_gone(killed)
    killed.run("train")
    assert len((killed.run_folder / "train/attempts.jsonl").read_text().splitlines()) >= 1
    assert_same_training(killed, straight)


# A whole chain: an evaluation before and after, training, an export.
@pytest.mark.parametrize("is_reinforced", [False, pytest.param(True, marks=pytest.mark.faults("slow"))])
def test_what_it_has_trained_is_measured_and_taken_by_name(store: Path, tmp_path: Path, is_reinforced: bool) -> None:
    # What is made of its model is nothing that others would find in the store that they share.
    store = Path(shutil.copytree(store, tmp_path / "store", symlinks=True))
    cold = WorkflowFolder(tmp_path / "work", store, SFT | {"training.num_steps": 2})
    cold.run("all", "verify", config={"run": "cold"})
    summary = json.loads((cold.results / "cold/summary.json").read_text())
    assert None not in (summary["pass_rate_before"], summary["pass_rate_after"])
    assert summary["mismatch_abs_diff_mean"] is None
    source = {"model.source.kind": "run", "model.source.run": "cold"}
    reinforced = WorkflowFolder(cold.folder, store, FAST | source | {"training.num_steps": 1})
    plan = reinforced.dry_run("train", config={"run": "warm"})
    assert "make_tiny_model" not in plan
    assert "list_hf_checkpoint" in plan
    if not is_reinforced:
        reinforced.run("resolve_config", config={"run": "warm"})
    else:
        reinforced.run("train", "verify_store", config={"run": "warm"})
        check_first_step(cold.results / "warm")
    digest = read_receipt(cold.results / "cold/hf.receipt.json").digest
    assert digest in (cold.results / "warm/experiment.yaml").read_text()


def check_first_step(run: Path) -> None:
    (row,) = (json.loads(line) for line in (run / "train/metrics.jsonl").read_text().splitlines())
    assert row["mismatch/abs_diff_mean"] < 1e-4, "engine and trainer begin with the same weights"

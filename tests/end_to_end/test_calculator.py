"""A model learns to call a tool from the reward alone; with a constant one it does not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.workflow_runs import WorkflowFolder

from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_STEPS = 16
# Of the demo on two cores that do nothing else.
MOST_SECONDS = 360
CALL, ANSWER = "<tool_call>", "<|observation|>"
CONSTANT = """from posttrain.rl.environments.calculator import Calculator


class Constant(Calculator):
    async def reward(self, trajectory):
        return {"reward": 1.0, "solved": await super().reward(trajectory)}
"""


def settings(seed: int, num_steps: int) -> dict[str, object]:
    steps: dict[str, object] = {"training.num_steps": num_steps, "trainer.save_interval": num_steps}
    steps |= {"data.num_heldout_prompts": 64, "logging.keep_rollouts": "true"}
    return {"data.seed": seed, "training.seed": seed, **steps}


def first_trajectories(workflow: WorkflowFolder) -> list[Trajectory]:
    """Return what the model did before its first update."""
    groups = RolloutStore(workflow.run_folder / "train/rollouts").read_step(0, 16)
    return [one for group in groups for one in group.trajectories]


def check_learned(workflow: WorkflowFolder, least: float) -> None:
    before, after = workflow.summary["pass_rate_before"], workflow.summary["pass_rate_after"]
    assert before <= 0.3
    assert after >= least, (before, after)
    alone = [one.reward for one in first_trajectories(workflow) if not one.parts["episode/tool_calls"]]
    assert len(alone) > 100
    assert sum(alone) / len(alone) <= 0.1, "without the tool the model can do it, too"


def test_a_model_learns_to_call_a_tool(tmp_path: Path) -> None:
    """What is trained on is what was sampled; the trainer and the engine agree on it; the report shows it.

    Trainer and engine take turns, and held-out episodes are played between steps.
    """
    turns = {"engine.sleep": "always", "evaluation.interval": NUM_STEPS // 2, "evaluation.max_share": 1}
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", settings(7, NUM_STEPS) | turns)
    workflow.run(config={"model": "tiny_qwen3", "recipe": "calculator"})
    check_learned(workflow, 0.6)
    called = [one for one in first_trajectories(workflow) if one.parts["episode/tool_calls"]]
    assert called
    for one in called:
        stretches = "".join(map(str, one.loss_mask)).lstrip("0").split("0")
        assert len([stretch for stretch in stretches if stretch]) == one.parts["episode/turns"]
    rows = [json.loads(line) for line in (workflow.run_folder / "train/metrics.jsonl").read_text().splitlines()]
    measured = [row["evaluation/heldout/pass_rate"] for row in rows if "evaluation/heldout/pass_rate" in row]
    assert measured
    assert rows[-1]["episode/tool_calls"] > 0.6 > rows[0]["episode/tool_calls"]
    assert max(row["mismatch/quantised_abs_diff_mean"] for row in rows if "mismatch/kl_k3" in row) < 1e-2
    after: dict[str, Any] = json.loads((workflow.run_folder / "evaluation/after.json").read_text())
    assert after["pass_all"]["2"][0] <= after["pass_at"]["2"][0]
    assert after["episodes"]["tool_calls"] > 0.6
    page = (workflow.run_folder / "report.html").read_text()
    assert "Turns of an episode" in page
    assert all(f"{count} with {turns}" in page for turns, count in after["episodes"]["by_turns"].items())
    assert 'class="read"' in page


@pytest.mark.faults("slow")
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_the_demo_learns_with_each_seed(seed: int, tmp_path: Path) -> None:
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", settings(seed, 40))
    began = time.perf_counter()
    workflow.run(config={"model": "tiny", "recipe": "calculator"}, timeout=1700)
    seconds, processes_per_core = time.perf_counter() - began, max(1.0, os.getloadavg()[2] / (os.cpu_count() or 1))
    print(f"seed {seed}: {seconds:.0f} s, with {processes_per_core:.1f} processes per core")
    assert seconds <= MOST_SECONDS * processes_per_core
    check_learned(workflow, 0.8)


@pytest.mark.faults("slow")
def test_a_constant_reward_teaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "constant.py").write_text(CONSTANT)
    # Such an environment is rejected: it pays agents that do nothing.
    own = {"data.environment": "constant.py:Constant", "reward.max_other_label": 1}
    workflow = WorkflowFolder(tmp_path / "run", tmp_path / "store", settings(7, 40) | own)
    workflow.run(config={"model": "tiny", "recipe": "calculator"})
    rows = [json.loads(line) for line in (workflow.run_folder / "train/metrics.jsonl").read_text().splitlines()]
    solved = [row["reward/environment/solved"] for row in rows]
    # A mean of 256 trajectories has a standard error of 0.03.
    assert abs(sum(solved[-8:]) - sum(solved[:8])) / 8 <= 0.05

"""Engines that run ahead of a real trainer: what is trained on, from which weights, and what a kill leaves.

Real engines on the CPU, the product's own rank, weights over HTTP. Engines without random numbers of their own and
batches that depend on the moment make no two runs equal, so these tests hold what must be true of every run.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tests.support.queued_trainings import (
    GROUP_SIZE,
    NUM_GROUPS,
    NUM_STEPS,
    engines_of,
    finish,
    kill,
    prepare,
    rows_of,
    start,
    trained,
)

from posttrain.types import TrajectoryGroup

# Mean |trainer - engine| in nats of equal weights in FP32; other weights differ by 1e-2 and more.
SAME_WEIGHTS = 1e-5


def check_bound(steps: list[list[TrajectoryGroup]], max_staleness: int) -> None:
    """Every token has a version, of weights that existed and are not too old; every position is trained on once."""
    for step, groups in enumerate(steps):
        spans = [span for group in groups for one in group.trajectories for span in one.versions]
        assert all(span.version is not None and 0 <= step - span.version <= max_staleness for span in spans)
        assert all(len(group.trajectories) == GROUP_SIZE for group in groups)
    positions = [group.position for groups in steps for group in groups]
    assert sorted(positions) == list(range(NUM_GROUPS * NUM_STEPS))


@pytest.mark.parametrize(
    ("on_new_weights", "max_staleness"), [("recompute", 2), ("keep", 1), ("finish", 1), ("abort", 2)]
)
def test_engines_run_ahead(tmp_path: Path, on_new_weights: str, max_staleness: int) -> None:
    """In each mode the bound holds, and tokens of the trainer's weights have the trainer's probabilities.

    Held-out prompts are answered meanwhile; each answer has to name the weights of its measurement.
    """
    folder = tmp_path / "run"
    prepare(folder, rollout__on_new_weights=on_new_weights, rollout__max_staleness=max_staleness, rollout__fp8="false",
            rollout__max_response_tokens=24, trainer__mismatch_interval=1, evaluation__interval=2,
            evaluation__max_share=1, algorithm__routing_replay="true")  # fmt: skip
    with engines_of(folder) as engines:
        finish(start(folder, "run", engines))
    steps, rows = trained(folder, "run"), rows_of(folder, "run")
    assert len(steps) == len(rows) == NUM_STEPS
    check_bound(steps, max_staleness)
    assert any(row["queue/staleness_max"] > 0 for row in rows)
    assert all(row["queue/staleness_max"] <= max_staleness for row in rows)
    paused = [row.get("perf/publish_pause_seconds", 0.0) for row in rows]
    assert all(0 < pause < row["perf/weight_sync_seconds"] for pause, row in zip(paused[:-1], rows[:-1], strict=True))
    assert not paused[-1], "nothing is published after the last step"
    saved = {step: row for step, row in enumerate(rows) if "perf/save_pause_seconds" in row}
    assert [*saved] == [2, 4]
    assert all(row["perf/save_pause_seconds"] > row["perf/save_seconds"] for row in saved.values())
    measured = [step for step, row in enumerate(rows) if "evaluation/heldout/pass_rate" in row]
    assert measured == [2, 4]
    assert {path.name for path in (folder / "run" / "evaluations").iterdir()} >= {
        "step_000002.json",
        "step_000004.json",
    }
    # A fast engine may end all responses between two publishes; with finish it always does.
    if on_new_weights == "finish":
        assert not any(row["queue/mixed_version_fraction"] for row in rows)
    compared = [row["mismatch/quantised_abs_diff_mean"] for row in rows if "mismatch/quantised_abs_diff_mean" in row]
    assert max(compared) < SAME_WEIGHTS


def test_a_killed_run_keeps_what_its_steps_trained_on(tmp_path: Path) -> None:
    """Steps after the last checkpoint train on the same groups again, in order; nothing is trained on twice."""
    folder, seed = tmp_path / "run", 7
    prepare(folder, rollout__max_staleness=2, algorithm__routing_replay="true")
    draw, seen = random.Random(seed), dict[int, list[tuple[int, tuple[int, ...]]]]()
    with engines_of(folder) as engines:
        for _ in range(4):
            rank = start(folder, "run", engines)
            time.sleep(draw.uniform(2.0, 9.0))
            kill(rank)
            for step, groups in enumerate(trained(folder, "run")):
                content = [(group.position, group.trajectories[0].tokens) for group in groups]
                assert seen.setdefault(step, content) == content, f"step {step} took other groups after a kill"
        finish(start(folder, "run", engines))
    steps = trained(folder, "run")
    assert len(steps) == NUM_STEPS
    for step, content in seen.items():
        assert [(group.position, group.trajectories[0].tokens) for group in steps[step]] == content
    check_bound(steps, 2)


def test_groups_that_teach_nothing_are_replaced(tmp_path: Path) -> None:
    """Dynamic sampling, with engines and trainer in turn: every prompt is asked once, dropped groups are counted."""
    folder = tmp_path / "run"
    prepare(
        folder, rollout__max_staleness=0, rollout__dynamic_sampling="true", rollout__max_oversampling=2.0,
        algorithm__preset="grpo", training__num_steps=2
    )  # fmt: skip
    with engines_of(folder) as engines:
        finish(start(folder, "run", engines))
    # An untrained model never sorts, so a step drops what it may, and then keeps groups as they are.
    assert [row["queue/dropped_equal_rewards"] for row in rows_of(folder, "run")] == [NUM_GROUPS, NUM_GROUPS]
    positions = [sorted(group.position for group in groups) for groups in trained(folder, "run")]
    assert positions == [list(range(NUM_GROUPS, 2 * NUM_GROUPS)), list(range(3 * NUM_GROUPS, 4 * NUM_GROUPS))]


def test_a_step_leaves_its_tail_to_the_next(tmp_path: Path) -> None:
    """Trainer and engines take turns: unfinished responses go on with new weights, and each token has its version."""
    folder = tmp_path / "run"
    prepare(folder, engine__sleep="always", rollout__tail_fraction=0.5, rollout__on_new_weights="abort",
            rollout__fp8="false", rollout__max_response_tokens=24, trainer__mismatch_interval=1,
            engine__max_running_requests=2 * GROUP_SIZE, algorithm__routing_replay="true")  # fmt: skip
    with engines_of(folder) as engines:
        finish(start(folder, "run", engines))
    steps, rows = trained(folder, "run"), rows_of(folder, "run")
    assert len(steps) == len(rows) == NUM_STEPS
    check_bound(steps, 1)
    assert any(row["queue/mixed_version_fraction"] > 0 for row in rows), "no response went on in a later step"
    assert all(row["queue/groups_running"] <= NUM_GROUPS / 2 for row in rows)
    compared = [row["mismatch/quantised_abs_diff_mean"] for row in rows if "mismatch/quantised_abs_diff_mean" in row]
    assert max(compared) < SAME_WEIGHTS

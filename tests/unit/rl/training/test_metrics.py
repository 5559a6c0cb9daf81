"""What a step says of its rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from posttrain.report.metrics import check_metrics
from posttrain.rl.training import metrics
from posttrain.types import Prompt, RolloutResult, Trajectory, TrajectoryGroup


def rollout(*rewards: list[float | None], parts: Mapping[str, float] | None = None) -> RolloutResult:
    def sample(index: int, reward: float | None) -> Trajectory:
        return Trajectory.of_response(
            (1, 2),
            (3,),
            (-0.5,),
            0,
            prompt_id=0,
            sample_index=index,
            reward=reward,
            scores={"own": reward},
            parts=parts or {},
        )

    groups = [[sample(index, reward) for index, reward in enumerate(group)] for group in rewards]
    prompt = Prompt(0, ({"role": "user", "content": "?"},), "label")
    return RolloutResult([TrajectoryGroup(prompt, tuple(samples)) for samples in groups], 0)


@pytest.mark.parametrize(
    ("rewards", "is_equal"),
    [
        ([0.5, 0.5], 1.0),
        ([0.1 + 0.2 + 99.7, 99.7 + 0.2 + 0.1], 1.0),
        ([100.0, math.nextafter(100.0, 200.0)], 1.0),
        ([100.0, 100.001], 0.0),
        ([0.0, 1e-9], 0.0),
        ([-100.0, 100.0], 0.0),
        ([None, 0.5], 1.0),
        ([None, None], 1.0),
        ([None, 0.5, 1.0], 0.0),
    ],
)
def test_rewards_that_differ_by_rounding_are_counted_as_equal(rewards: list[float | None], is_equal: float) -> None:
    assert metrics._rollout_metrics(rollout(rewards), True)["rollout/reward_std_zero_fraction"] == is_equal


def test_a_step_has_so_many_metrics_of_graders(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {f"own/{number}": 1.0 for number in range(20)}
    before = metrics._rollout_metrics(rollout([1.0], parts=parts), True)
    assert "reward/own/19" in before
    assert not caplog.text
    monkeypatch.setattr(metrics, "MAX_NAMES", 10)
    found = metrics._rollout_metrics(rollout([1.0], parts=parts), True)
    assert len(before) - len(found) == 13  # of 20 parts, the score, mean and rate
    assert found["rollout/reward_mean"] == 1.0
    assert "the first 10 are kept" in caplog.text


def test_numbers_of_episodes_are_means_and_percentiles() -> None:
    groups = [
        group
        for turns in range(1, 11)
        for group in rollout([0.0], parts={"episode/turns": turns, "perf/engine_seconds": 0.5 * turns}).groups
    ]
    found = metrics._rollout_metrics(RolloutResult(groups, 0), True)
    told = {name: value for name, value in found.items() if name.startswith(("episode/", "perf/"))}
    assert told == {
        "episode/turns": 5.5,
        "episode/turns_p50": 5,
        "episode/turns_p90": 9,
        "perf/engine_seconds": 2.75,
        "perf/engine_seconds_p50": 2.5,
        "perf/engine_seconds_p90": 4.5,
    }
    check_metrics(found)

"""What verifiers says of a finished episode, as a reward or a failure; the library itself is asked end to end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from posttrain_verifiers.episode import EpisodeFailure, grade_of

NAN = float("nan")


def reward(score: float, weight: float) -> SimpleNamespace:
    return SimpleNamespace(score=score, weight=weight, value=score * weight)


def played(rewards: dict[str, Any], metrics: dict[str, Any], trace: dict[str, Any], **episode: Any) -> Any:
    """Return an episode with the fields that are read."""
    total = sum(given.value for given in rewards.values() if given is not None)
    of_trace = {"errors": [], "is_timeout": False, "stop_condition": "agent_completed", **trace}
    traces = [SimpleNamespace(rewards=rewards, metrics=metrics, reward=total, **of_trace)]
    return SimpleNamespace(**{"traces": traces, "errors": [], "is_timeout": False, "ok": True, **episode})


def test_weighted_rewards_and_their_parts() -> None:
    rewards = {"right": reward(1.0, 0.75), "reward": reward(2.0, -0.25)}
    metrics = {"letters": 3.0, "not asked": None, "odd": NAN}
    assert grade_of(played(rewards, metrics, {})) == {"reward": 0.25, "parts": {"right": 1.0, "letters": 3.0}}


ERROR = SimpleNamespace(type="TaskError", message="a defect")
FINE = {"right": reward(1.0, 1.0)}


@pytest.mark.parametrize(
    ("episode", "kind", "reason"),
    [
        (played(FINE, {}, {"errors": [ERROR]}, ok=False), "error", "TaskError: a defect"),
        (played(FINE, {}, {}, ok=False, errors=[ERROR]), "error", "TaskError: a defect"),
        (played(FINE, {}, {}, ok=False), "error", "it says no reason"),
        (played(FINE, {}, {}, ok=False, errors=[ERROR], is_timeout=True, traces=[]), "deadline", "TaskError: a defect"),
        (
            played({"right": None}, {}, {"is_timeout": True, "stop_condition": "scoring_timeout"}),
            "deadline",
            "verifiers' own limit: scoring_timeout",
        ),
        (played(FINE | {"asked": None}, {}, {}), "error", "no reward: asked"),
        (played({}, {}, {}), "error", "no reward: the task has none"),
        (played({"right": reward(NAN, 1.0)}, {}, {}), "error", "the reward is nan, no finite number"),
    ],
)
def test_what_is_no_reward_is_a_failure(episode: Any, kind: str, reason: str) -> None:
    with pytest.raises(EpisodeFailure) as caught:
        grade_of(episode)
    assert (caught.value.kind, caught.value.reason) == (kind, reason)

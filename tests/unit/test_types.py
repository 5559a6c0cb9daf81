"""Trajectories: what is consistent, what they tell of themselves, and their form as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trajectories import segmented, trajectories

from posttrain.types import Prompt, Trajectory, TrajectoryGroup, VersionSpan

# Two turns: the model read 5, 9, sampled 7, 1, read 4, 4, and sampled 3 after an update of the weights.
TURNS = Trajectory(
    7,
    2,
    (5, 9, 7, 1, 4, 4, 3),
    (0, 0, 1, 1, 0, 0, 1),
    (-0.1, -0.2, -0.3),
    (VersionSpan(3, 2), VersionSpan(4, 1)),
    "stop",
    1,
)


def test_a_trajectory_of_two_turns() -> None:
    assert (TURNS.num_tokens, TURNS.num_sampled) == (7, 3)
    assert (TURNS.prompt_tokens, TURNS.sampled_tokens) == ((5, 9), (7, 1, 3))
    assert (TURNS.oldest_version, TURNS.newest_version) == (3, 4)


def test_a_prompt_with_one_response() -> None:
    one = Trajectory.of_response([5, 9], [7, 1], [-0.1, -0.2], 3, prompt_id=7, sample_index=2, finish_reason="length")
    assert one == Trajectory(7, 2, (5, 9, 7, 1), (0, 0, 1, 1), (-0.1, -0.2), (VersionSpan(3, 2),), "length", None)
    spans = (VersionSpan(3, 1), VersionSpan(4, 1))
    assert Trajectory.of_response([5, 9], [7, 1], [-0.1, -0.2], versions=spans, prompt_id=7).versions == spans
    unreported = Trajectory.of_response([5, 9], [7, 1], [-0.1, -0.2], prompt_id=7)
    assert unreported.versions == (VersionSpan(None, 2),)
    assert (unreported.oldest_version, unreported.newest_version) == (None, None)
    assert Trajectory.of_response([5, 9], [7, 1], prompt_id=7).versions == (), "no engine sampled it"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_mask": (0, 0, 1, 1, 0, 0)}, "7 tokens with a loss mask of 6"),
        ({"loss_mask": (0, 0, 1, 1, 0, 2, 1)}, r"values \[0, 1, 2\]"),
        ({"loss_mask": (0,) * 7}, "no token is sampled"),
        ({"loss_mask": (1, 0, 1, 1, 0, 0, 0)}, "the first token is sampled"),
        ({"tokens": (), "loss_mask": ()}, "no token is sampled"),
        ({"logprobs": (-0.1, -0.2)}, "3 sampled tokens, 2 log-probabilities"),
        ({"versions": (VersionSpan(3, 2),)}, "3 sampled tokens, weight versions of 2"),
        ({"versions": (VersionSpan(3, 3), VersionSpan(4, 0))}, "a weight version without tokens"),
        ({"segment_lengths": (4, 2)}, r"7 tokens, segments of \(4, 2\)"),
        ({"segment_lengths": (4, 3, 0)}, r"7 tokens, segments of \(4, 3, 0\)"),
        ({"segment_lengths": (3, 4)}, "a segment that begins with a sampled token, or has none"),
        ({"segment_lengths": (4, 2, 1)}, "a segment that begins with a sampled token, or has none"),
    ],
)
def test_what_is_inconsistent_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"prompt 7 sample 2: .*{said}"):
        Trajectory(**vars(TURNS) | changes)


@settings(max_examples=200, deadline=None)
@given(trajectories(), st.integers(-1, 3))
def test_json_keeps_every_bit(one: Trajectory, position: int) -> None:
    group = TrajectoryGroup(Prompt(one.prompt_id, (), ""), (one,), position)
    plain = json.loads(json.dumps(group.as_dict()))
    assert TrajectoryGroup.from_dict(plain) == group
    assert ("position" in plain) == (position >= 0)
    assert plain["trajectories"][0]["loss_mask"] == "".join(map(str, one.loss_mask))


@settings(max_examples=200, deadline=None)
@given(trajectories())
def test_properties_are_those_of_the_mask(one: Trajectory) -> None:
    pairs = list(zip(one.tokens, one.loss_mask, strict=True))
    stretches = [
        (sampled, [token for token, _ in stretch]) for sampled, stretch in groupby(pairs, lambda pair: pair[1])
    ]
    assert list(one.prompt_tokens) == stretches[0][1]
    assert list(one.sampled_tokens) == [token for sampled, stretch in stretches if sampled for token in stretch]
    assert one.num_sampled == len(one.sampled_tokens)


def test_segments_are_sequences_of_their_own() -> None:
    episode = replace(TURNS, segment_lengths=(4, 3))
    first, second = episode.segments()
    assert (first.tokens, second.tokens) == ((5, 9, 7, 1), (4, 4, 3))
    assert (first.loss_mask, second.loss_mask) == ((0, 0, 1, 1), (0, 0, 1))
    assert (first.logprobs, second.logprobs) == ((-0.1, -0.2), (-0.3,))
    assert (first.versions, second.versions) == ((VersionSpan(3, 2),), (VersionSpan(4, 1),))
    assert (second.prompt_id, second.sample_index, second.reward, second.segments()) == (7, 2, 1, [second])
    assert TURNS.segments() == [TURNS]


@settings(max_examples=50, deadline=None)
@given(segmented())
def test_segments_hold_the_whole_trajectory(episode: Trajectory) -> None:
    parts = episode.segments()
    assert tuple(part.num_tokens for part in parts) == episode.segment_lengths
    for name in ("tokens", "loss_mask", "logprobs"):
        assert tuple(value for part in parts for value in getattr(part, name)) == getattr(episode, name)
    each = [span.version for span in episode.versions for _ in range(span.num_tokens)]
    assert [span.version for part in parts for span in part.versions for _ in range(span.num_tokens)] == each
    assert Trajectory.from_dict(json.loads(json.dumps(episode.as_dict()))) == episode

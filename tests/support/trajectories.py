"""Trajectories of any form, for properties that hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from posttrain.types import Trajectory, VersionSpan


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Draw a trajectory: sampled stretches and others in any order behind at least one token of a prompt."""
    mask = (0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12).filter(any)))
    count = sum(mask)
    tokens = draw(st.lists(st.integers(0, 2**40), min_size=len(mask), max_size=len(mask)))
    is_sampled = draw(st.booleans())
    numbers = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
    logprobs = draw(st.lists(numbers, min_size=count, max_size=count)) if is_sampled else []
    return Trajectory(
        prompt_id=draw(st.integers(0, 9)),
        sample_index=draw(st.integers(0, 9)),
        tokens=tuple(tokens),
        loss_mask=mask,
        logprobs=tuple(logprobs),
        versions=draw(_versions(count)) if is_sampled else (),
        finish_reason=draw(st.sampled_from(("stop", "length"))),
        reward=draw(st.none() | st.floats(-1, 1)),
    )


@st.composite
def segmented(draw: st.DrawFn) -> Trajectory:
    """Draw a trajectory of several segments."""
    parts = draw(st.lists(trajectories().filter(lambda one: bool(one.logprobs)), min_size=2, max_size=4))
    return replace(
        parts[0],
        tokens=tuple(token for part in parts for token in part.tokens),
        loss_mask=tuple(mark for part in parts for mark in part.loss_mask),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        versions=tuple(span for part in parts for span in part.versions),
        segment_lengths=tuple(part.num_tokens for part in parts),
    )


@st.composite
def _versions(draw: st.DrawFn, count: int) -> tuple[VersionSpan, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]
    return tuple(VersionSpan(draw(st.none() | st.integers(0, 5)), length) for length in lengths)


def as_samples(group: dict[str, Any]) -> dict[str, Any]:
    """Return a stored group of ordinary trajectories in the form of older releases."""
    for one in group["trajectories"]:
        tokens, start, (version,) = one.pop("tokens"), one.pop("loss_mask").index("1"), one.pop("versions")
        one |= {"prompt_tokens": tokens[:start], "response_tokens": tokens[start:]}
        one |= {"weight_version": version["version"], "rollout_logprobs": one.pop("logprobs")}
    return {"prompt": group["prompt"], "samples": group["trajectories"]}

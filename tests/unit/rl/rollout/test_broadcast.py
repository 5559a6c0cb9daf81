from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trajectories import segmented, trajectories

from posttrain.rl.rollout.broadcast import as_plain, from_plain
from posttrain.types import Prompt, RolloutResult, Routes, Trajectory, TrajectoryGroup


def sample(index: int, logprobs: tuple[float, ...]) -> Trajectory:
    tokens = tuple(range(151_000, 151_000 + len(logprobs)))
    routes = (Routes("rollouts/chunk_0000.routes", 7, (3, len(tokens) + 2, 8), "uint8", "f" * 16),) if index else ()
    version = None if index else 3
    return Trajectory.of_response(
        (1, 2, 2**40), tokens, logprobs, version, prompt_id=7, sample_index=index, reward=0.1 * index, routes=routes
    )


def test_a_rollout_arrives_bit_for_bit() -> None:
    rows = ((-0.1, -1e-320, -0.0), (-math.inf, math.nan))
    group = TrajectoryGroup(
        Prompt(7, ({"role": "user", "content": "é"},), "12"), tuple(sample(i, row) for i, row in enumerate(rows))
    )
    sent = RolloutResult([group], num_replayed=1)
    arrived = from_plain(json.loads(json.dumps(as_plain(sent))))
    (samples,) = (found.trajectories for found in arrived.groups)
    assert [[value.hex() for value in found.logprobs] for found in samples] == [
        ["-0x1.999999999999ap-4", "-0x0.00000000007e8p-1022", "-0x0.0p+0"],
        ["-inf", "nan"],
    ]
    assert repr(arrived) == repr(sent), "down to tuples and lists"


@settings(max_examples=100, deadline=None)
@given(st.lists(trajectories() | segmented(), min_size=1, max_size=3), st.integers(-1, 2))
def test_any_trajectory_arrives_bit_for_bit(given_ones: list[Trajectory], position: int) -> None:
    sent = RolloutResult([TrajectoryGroup(Prompt(7, (), "12"), tuple(given_ones), position)], num_replayed=0)
    assert from_plain(json.loads(json.dumps(as_plain(sent)))) == sent

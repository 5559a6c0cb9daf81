from __future__ import annotations

import json
import math

from posttrain.rl.rollout.broadcast import as_plain, from_plain
from posttrain.types import Prompt, RolloutResult, Routes, Sample, SampleGroup


def sample(index: int, logprobs: tuple[float, ...]) -> Sample:
    tokens = tuple(range(151_000, 151_000 + len(logprobs)))
    routes = Routes("rollouts/chunk_0000.routes", 7, (3, len(tokens) + 2, 8), "uint8", "f" * 16) if index else None
    version = None if index else 3
    return Sample(7, index, (1, 2, 2**40), tokens, logprobs, "stop", version, 0.1 * index, routes=routes)


def test_a_rollout_arrives_bit_for_bit() -> None:
    rows = ((-0.1, -1e-320, -0.0), (-math.inf, math.nan))
    group = SampleGroup(
        Prompt(7, ({"role": "user", "content": "é"},), "12"), tuple(sample(i, row) for i, row in enumerate(rows))
    )
    sent = RolloutResult([group], num_replayed=1)
    arrived = from_plain(json.loads(json.dumps(as_plain(sent))))
    (samples,) = (found.samples for found in arrived.groups)
    assert [[value.hex() for value in found.rollout_logprobs] for found in samples] == [
        ["-0x1.999999999999ap-4", "-0x0.00000000007e8p-1022", "-0x0.0p+0"],
        ["-inf", "nan"],
    ]
    assert repr(arrived) == repr(sent), "down to tuples and lists"

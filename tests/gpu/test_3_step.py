"""A whole update on one GPU against the same on a CPU.

The yardstick is measured, too: how far a CPU in BF16 is from one in FP32, on the same weights and samples. A GPU may
be twice as far: it adds up in another order, and multiplies FP32 in TF32 where Transformer Engine does, with three bits
more than BF16 has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.gpus import distance, gpu

CASES = [
    pytest.param("cpu", "bf16", False),  # a model is trained in either precision
    pytest.param("cpu", "bf16", True, marks=pytest.mark.faults("slow")),
    *(gpu("cuda", dtype, replays) for dtype in ("fp32", "bf16") for replays in (False, True)),
]


@pytest.mark.parametrize(("device", "dtype", "replays"), CASES)
def test_an_update_is_that_of_a_cpu(
    updated: Callable[..., dict[str, Any]], device: str, dtype: str, replays: bool
) -> None:
    places = (("cpu", "fp32"), ("cpu", "bf16"), (device, dtype))
    exact, rounded, found = (updated(*place, replays=replays) for place in places)
    for when in ("before", "after"):
        yardstick = distance(exact[when], rounded[when])
        assert 0 < yardstick < 0.1, "the two precisions are near each other, and not the same"
        assert distance(exact[when], found[when]) <= 2 * yardstick, when
    learned = distance(exact["before"], exact["after"])
    assert learned > 2 * distance(exact["after"], rounded["after"]), "an update is more than rounding"
    norm, of_rounded, of_found = (one["statistics"]["grad_norm"] for one in (exact, rounded, found))
    assert abs(norm - of_found) <= 2 * max(abs(norm - of_rounded), 2**-8 * norm)
    assert found["statistics"]["num_tokens"] == exact["statistics"]["num_tokens"]
    assert found["statistics"]["outcome"]

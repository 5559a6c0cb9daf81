"""Weights from process to process: over memory that both share, from GPU to GPU, and over what both give.

Several GPUs are pretended on one: to NCCL their processes are on several hosts, which is the way over a network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import transfer_members
from tests.support.gpus import gpu
from tests.support.megatron_single import run_ranks

# Its memory cannot be shared as a whole, which is why shared memory is not torch's.
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Trainer ranks -> where they are, and where engines are behind them.
CASES: dict[str, tuple[int, list[str], str]] = {
    "one GPU": (1, [], "shared"),
    "one GPU, two ranks": (2, [], "shared shared"),
    "together": (2, ["a", "b", "a", "b"], "shared group"),
    "apart": (2, ["a", "b", "c", "d"], "group group"),
    "other versions": (1, ["a 2.30.7", "b 2.28.3"], "host"),
}


@pytest.mark.parametrize(("case", "device"), [("together", "cpu"), *(gpu(name, "cuda") for name in CASES)])
def test_weights_come_as_they_were_sent(case: str, device: str) -> None:
    num_trainers, places, ways = CASES[case]
    num_members = len(places) or 2 * num_trainers
    told = transfer(device, num_trainers, num_members, places, (256, 512), 12, 1 << 19)
    assert [member["wrong"] for member in told[num_trainers:]] == [0] * (num_members - num_trainers)
    assert told[0]["ways"] == ways.split()
    assert sum(member.get("sent", 0) for member in told) == sum(member.get("received", 0) for member in told)


def transfer(
    device: str, trainers: int, members: int, places: list[str], shape: tuple[int, int], tensors: int, round_bytes: int
) -> list[dict[str, Any]]:
    """Return what members tell of a transfer of matrices."""
    order = {"device": device, "trainers": trainers, "places": places, "shape": shape, "tensors": tensors}
    own = EXPANDABLE if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    arguments = json.dumps({**order, "round_bytes": round_bytes})
    outputs = run_ranks(Path(transfer_members.__file__), members, arguments, environment=own)
    return [json.loads([line for line in output.splitlines() if line.startswith("{")][-1]) for output in outputs]

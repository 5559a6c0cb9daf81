"""Memory that the allocator counts in a phase, beside the plan of the same phase, for a real model on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.gpus import gpu, told_by_ranks

ONE_GPU = (
    "hardware.gpus_per_node=1 engine.num_engines=1 engine.gpus_per_engine=1 "
    "trainer.max_tokens_per_gpu=8192 rollout.max_response_tokens=4096"
)
REQUESTS = {
    "cpu": {"model": "tiny", "site": "local"},
    "cuda": {"model": "qwen3_0.6b", "site": "local", "hardware": "h100", "set": ONE_GPU},
}


@pytest.mark.parametrize("device", ["cpu", gpu("cuda")])
def test_phases_hold_what_the_plan_says(device: str) -> None:
    """On a CPU the figures are those of a whole process, and only their being there is looked at."""
    told: dict[str, Any] = told_by_ranks(1, work="steps", device=device, request=REQUESTS[device])
    asleep = told.pop("asleep")
    # What kernels and communicators keep is no part of the trainer.
    assert asleep["gib"] < (1 if device == "cuda" else 1e-9), "what sleeps leaves the GPU to others"
    assert asleep["seconds"] > 0
    assert {*told} == {"old_logprobs", "train"}
    for phase, row in told.items():
        assert row["peak_gib"] > 0
        assert row["planned_gib"] > 0
        if device == "cuda":
            most = row["planned_gib"] + row["reserve_gib"]
            assert row["peak_gib"] <= most, f"{phase}: more than a GPU that is full by the plan has left; {row}"
            # The plan's own bound is 5 % against a rehearsal; kernels choose workspaces that nobody plans.
            assert row["peak_gib"] >= 0.8 * row["planned_gib"], f"{phase}: far less than planned; {row}"

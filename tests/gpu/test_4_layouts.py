"""Two GPUs in every layout against one, over NCCL: what gloo has shown elsewhere, where messages wait for streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.gpus import distance, gpu

LAYOUTS = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "tensor_and_expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.mark.parametrize(("name", "device"), [("tensor", "cpu"), *(gpu(name, "cuda", count=2) for name in LAYOUTS)])
def test_two_ranks_do_what_one_does(updated: Callable[..., dict[str, Any]], name: str, device: str) -> None:
    """In FP32; the yardstick is what BF16 changes on a CPU (see the step on one GPU)."""
    one, two = updated(device, "fp32"), updated(device, "fp32", LAYOUTS[name], ranks=2)
    for when in ("before", "after"):
        yardstick = distance(updated("cpu", "fp32")[when], updated("cpu", "bf16")[when])
        assert distance(one[when], two[when]) <= yardstick, when
    for statistic in ("grad_norm", "loss"):
        assert two["statistics"][statistic] == pytest.approx(one["statistics"][statistic], rel=2**-8, abs=2**-10)
    assert two["statistics"]["num_tokens"] == one["statistics"]["num_tokens"]

"""What is not finite is counted wherever it stands."""

from __future__ import annotations

import math

import pytest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_gradient_that_is_not_finite_is_found(policy, value: float) -> None:
    from posttrain.rl.megatron_backend.train_step import _count_non_finite_gradients

    policy.wrapped[0].zero_grad_buffer()
    assert _count_non_finite_gradients(policy) == 0
    policy.wrapped[0].buffers[0].grad_data[-1] = value
    assert _count_non_finite_gradients(policy) == 1
    policy.wrapped[0].zero_grad_buffer()

"""Answers to what Megatron asks of simulated devices (`posttrain_rehearsal`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.tensor_parallel import random


def without_random_state() -> None:
    """Let Megatron go without the random state of devices: dropout is 0."""
    random._set_cuda_rng_state = lambda *_, **__: None
    tracker = random.CudaRNGStatesTracker
    tracker.add, tracker.fork = lambda *_: None, lambda *_: contextlib.nullcontext()  # type: ignore[method-assign]


def tell_of_late_gradients(tell: Callable[[Any], None]) -> None:
    """Tell where a micro-batch adds to gradients that ranks are adding up already: its part is lost.

    Args:
        tell: Called with the first bucket of those gradients.
    """
    original = _ParamAndGradBucketGroup.register_grad_ready

    def register(self: Any, *given: Any, **more: Any) -> None:
        if self.is_last_microbatch and self.grad_reduce_handle is not None:
            tell(self.buckets[0])
        original(self, *given, **more)

    _ParamAndGradBucketGroup.register_grad_ready = register

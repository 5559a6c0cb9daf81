"""Patches Megatron for simulated devices (`posttrain_rehearsal`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.tensor_parallel import random


def without_random_state() -> None:
    """Let Megatron run without device random state, which is safe because dropout is 0."""
    random._set_cuda_rng_state = lambda *_, **__: None
    tracker = random.CudaRNGStatesTracker
    tracker.add, tracker.fork = lambda *_: None, lambda *_: contextlib.nullcontext()  # type: ignore[method-assign]


def tell_of_late_gradients(tell: Callable[[Any], None]) -> None:
    """Report a micro-batch that adds to gradients whose reduction has already started, which loses its part.

    Args:
        tell: Called with the first such bucket.
    """
    original = _ParamAndGradBucketGroup.register_grad_ready

    def register(self: Any, *given: Any, **more: Any) -> None:
        if self.is_last_microbatch and self.grad_reduce_handle is not None:
            tell(self.buckets[0])
        original(self, *given, **more)

    _ParamAndGradBucketGroup.register_grad_ready = register

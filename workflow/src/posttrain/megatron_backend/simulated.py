"""What Megatron asks of devices that are only said to be there (`posttrain.rehearsal`)."""

from __future__ import annotations

import contextlib

from megatron.core.tensor_parallel import random


def without_random_state() -> None:
    """Let Megatron go without the random state of devices: dropout is 0."""
    random._set_cuda_rng_state = lambda *_, **__: None
    tracker = random.CudaRNGStatesTracker
    tracker.add, tracker.fork = lambda *_: None, lambda *_: contextlib.nullcontext()  # type: ignore[method-assign]

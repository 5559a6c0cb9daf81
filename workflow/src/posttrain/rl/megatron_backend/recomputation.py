"""Outputs that are dropped after the forward pass and computed again for the backward pass.

Megatron drops the outputs of the modules in `recompute_modules` by this means; ours do it with its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel import random as megatron_random


class DroppedOutputs:
    """Runs a function whose outputs live in the forward pass only until they are used.

    Args:
        is_wanted: False: the outputs are kept, as autograd does. Without gradients nothing needs them later anyway.
    """

    def __init__(self, is_wanted: bool):
        self._checkpoint = CheckpointWithoutOutput() if is_wanted and torch.is_grad_enabled() else None

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return the function's output, whose storage must be its own."""
        output: Any = function(*inputs) if self._checkpoint is None else self._checkpoint.checkpoint(function, *inputs)
        return output  # type: ignore[no-any-return]

    def drop_until_gradient_of(self, user: torch.Tensor) -> None:
        """Release the output's bytes; they are there again when the gradient of `user`, made from it, is known."""
        if self._checkpoint is not None:
            self._checkpoint.discard_output_and_register_recompute(user)


def mend_dropped_outputs() -> None:
    """Let Megatron 0.19.2 drop outputs without a compiler and without Transformer Engine.

    It compiles a C++ extension in the first backward pass of each rank, so that the output and what is recomputed share
    their bytes. That needs a compiler and Python's headers on every node. Before 0.19 it copied, as this does: a tensor
    of 400 MB takes a fifth of a millisecond on an H200. And it takes `fp8=False` for a request of FP8.
    """
    original = CheckpointWithoutOutput.__init__

    def init(self: CheckpointWithoutOutput, fp8: Any = None) -> None:
        original(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = init
    megatron_random._get_share_storage = lambda: _copy_into


@torch.no_grad()
def _copy_into(dropped: torch.Tensor, recomputed: torch.Tensor) -> None:
    dropped.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
    # Through `data`, so that autograd does not take this for a change of what it has saved.
    dropped.data.copy_(recomputed)

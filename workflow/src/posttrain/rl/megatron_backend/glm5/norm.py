"""RMSNorm that works under sequence parallelism without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from posttrain.rl.megatron_backend.cpu_functions import rms_norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension.

    Megatron's torch norm refuses sequence parallelism, although it only needs the weight marked: its gradient then
    comes from one shard of the sequence, and Megatron sums the shards.

    Args:
        config: Megatron's configuration; it says whether the weight is the factor or its distance from 1.
        hidden_size: Width of the input.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        make = torch.zeros if self.is_zero_centered else torch.ones
        self.weight = torch.nn.Parameter(make(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` [..., hidden_size]; statistics are computed in FP32."""
        return rms_norm(x, self.weight, self.eps, self.is_zero_centered)

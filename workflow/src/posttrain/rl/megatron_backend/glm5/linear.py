"""Linear layers replicated over tensor-parallel ranks, and access to weights outside a module's forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


def await_weight(module: torch.nn.Module) -> None:
    """Run a module's forward hooks, which wait until its weight has been all-gathered."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


class ReplicatedLinear(torch.nn.Module):
    """x W^T on this rank's part of the sequence.

    For MLA's small down-projections. Megatron's local spec splits them over tensor-parallel ranks and gathers the
    result. The backward pass of that gather keeps each rank's own gradient of the shared rotary key, which covers only
    that rank's heads. With replicated weights, the gradient is correctly summed over the ranks' parts of the sequence.

    Args:
        config: Megatron's configuration.
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(self, config: TransformerConfig, in_features: int, out_features: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the output and a bias (None), like Megatron's linear layers."""
        return F.linear(x, self.weight), None


class FrozenLinear(torch.nn.Module):
    """x W^T with a weight that is never trained.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        dtype: Precision of the weight; the input is cast to it.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return F.linear(x.to(self.weight.dtype), self.weight)

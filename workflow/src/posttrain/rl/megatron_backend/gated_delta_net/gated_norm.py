"""RMSNorm of a gated delta net's heads, times an activated gate."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class GatedRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension, in FP32.

    The weight is the factor itself, also in models whose other norms store its distance from 1. Each tensor-parallel
    rank norms other heads with it, so Megatron has to sum its gradient over them, as under sequence parallelism.

    Args:
        config: Megatron's configuration.
        width: Of a head.
    """

    def __init__(self, config: TransformerConfig, width: int):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.weight.stays_fp32 = True  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., width] as `x` and `gate`."""
        result: torch.Tensor = _GatedNorm.apply(x, gate, self.weight, self.eps)
        return result


class _GatedNorm(torch.autograd.Function):
    """Keeps its inputs only; autograd would keep five tensors of their size in FP32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        normal, _ = _normal(x, eps)
        scaled = normal.to(x.dtype) * weight
        return torch.nn.functional.silu(gate.to(normal.dtype)).mul_(scaled).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, gate, weight = ctx.saved_tensors
        normal, inverse = _normal(x, ctx.eps)
        gate_in = gate.to(normal.dtype)
        share = gate_in.sigmoid()
        activated = gate_in * share
        of_scaled = grad * activated
        of_gate = (grad * normal * weight).mul_(share.add_(activated * (1 - share)))
        grad_weight = (of_scaled * normal).flatten(0, -2).sum(0)
        of_normal = of_scaled * weight
        grad_x = (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True)).mul_(inverse)
        return grad_x.to(x.dtype), of_gate.to(gate.dtype), grad_weight.to(weight.dtype), None


def _normal(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed `x`, and what it was multiplied by, in FP32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
    return wide * inverse, inverse

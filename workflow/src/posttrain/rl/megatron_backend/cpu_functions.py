"""Autograd functions with hand-written gradients for a machine without CUDA.

Transformer Engine and Apex have such kernels for GPUs. On a CPU, autograd would record each small operation by itself:
every one allocates its result, and the gradient of a slice is a new tensor of zeros with the slice copied into it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from posttrain.rl.algorithm.logprobs import add_product


def announce_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient that tells Megatron that a weight's real one has been added to its buffer.

    Megatron counts a weight as done when autograd has a gradient for it, which it does not read. So this is the weight,
    which needs no memory. It would read that of a tied embedding, whose gradients all come this way here.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    weight.zero_out_wgrad = False  # type: ignore[attr-defined]
    return weight.detach()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T; the backward pass adds the weight's gradient to Megatron's FP32 buffer."""
    return _Linear.apply(x, weight)


def embedding(places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix; the backward pass adds their gradients to Megatron's FP32 buffer.

    torch's gradient is a matrix of zeros with a few rows filled in, for every micro-batch.
    """
    return _Embedding.apply(places, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool = False) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, with statistics in FP32.

    With n = x r, r = 1 / rms and g = grad weight:  dx = r (g - n mean(g n)),  dweight = sum over tokens of grad n.

    Args:
        x: [..., width].
        weight: [width].
        eps: Added to the mean square.
        is_zero_centered: The factor is 1 + weight, in FP32, as in the models that store it so.
    """
    return _RmsNorm.apply(x, weight, eps, is_zero_centered)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        add_product(ctx.main_grad, rows.t(), x.reshape(-1, x.shape[-1]))
        grad_x = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, announce_gradient(weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places, weight)
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        return F.embedding(places, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        places, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).to(ctx.main_grad.dtype)
        ctx.main_grad.index_add_(0, places.flatten(), rows)
        return None, announce_gradient(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
        wide = x.float()
        width = x.shape[-1]
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norms.square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.is_zero_centered = is_zero_centered
        normal = wide * inverse
        if is_zero_centered:
            return normal.mul_(weight.float() + 1).to(x.dtype)
        return normal.mul_(weight) if x.dtype == torch.float32 else normal.to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        factor = weight.float() + 1 if ctx.is_zero_centered else weight.float()
        wide = grad.float()
        normal = x.float() * inverse
        product = wide * normal
        weight_grad = product.view(-1, x.shape[-1]).sum(0)
        share = (product @ factor).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(wide, factor, out=product).addcmul_(normal, share, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), weight_grad.to(weight.dtype), None, None

"""Causal depthwise convolution that stays within each packed sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

# Tokens whose intermediate values exist at a time.
TOKENS_AT_ONCE = 4096


class CausalConvolution(torch.nn.Module):
    """silu(sum over s of w_s x_{t - s}), where tokens before a sequence's first are 0; computed in FP32.

    The weight is laid out as that of `torch.nn.Conv1d`: [channels, 1, W], the token itself last.

    Args:
        config: Megatron's configuration.
        channels: Of this tensor-parallel rank.
    """

    def __init__(self, config: TransformerConfig, channels: int):
        super().__init__()
        shape = channels, 1, config.linear_conv_kernel_dim
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, channels: slice) -> torch.Tensor:
        """Convolve.

        Args:
            x: [T, G, C], G groups of channels.
            positions: [T] int64, of each token in its sequence.
            channels: Those of the G groups in the weight.

        Returns:
            [T, G, C].
        """
        weight = self.weight[channels, 0].unflatten(0, x.shape[1:])
        result: torch.Tensor = _Convolution.apply(x, weight, positions)
        return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, positions)
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for start, stop in _pieces(len(x)):
            result[start:stop] = F.silu(_summed(x, weight, positions, start, stop)[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        width = weight.shape[-1]
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        taps = [torch.zeros_like(weight[..., 0], dtype=_wide(x)) for _ in range(width)]
        for start, stop in _pieces(len(x)):
            # The tokens behind a piece feel its last ones.
            end = min(stop + width - 1, len(x))
            window, summed = _summed(x, weight, positions, start, end)
            share = summed.sigmoid()
            of_sum = grad[start:end] * share * (1 + summed * (1 - share))
            total = torch.zeros_like(window[width - 1 :][: stop - start])
            for back in range(width):
                felt = _within(of_sum[back:], positions[start + back : end], back)
                total[: len(felt)].addcmul_(felt[: len(total)], weight[..., width - 1 - back])
                own = _within(of_sum[: stop - start], positions[start:stop], back)
                first = width - 1 - back
                taps[width - 1 - back] += (own * window[first : first + stop - start]).sum(0)
            grad_x[start:stop] = total
        return grad_x, torch.stack(taps, -1).to(weight.dtype), None


def _pieces(num_tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, TOKENS_AT_ONCE):
        yield start, min(start + TOKENS_AT_ONCE, num_tokens)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _summed(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens from W - 1 before a piece on, and the sums of the piece before their activation."""
    width = weight.shape[-1]
    window = x[max(start - width + 1, 0) : stop].to(_wide(x))
    if start < width - 1:
        window = torch.cat([window.new_zeros(width - 1 - start, *x.shape[1:]), window])
    summed = window[width - 1 :] * weight[..., width - 1]
    for back in range(1, width):
        seen = _within(window[width - 1 - back :][: stop - start], positions[start:stop], back)
        summed.addcmul_(seen, weight[..., width - 1 - back].to(summed.dtype))
    return window, summed


def _within(values: torch.Tensor, positions: torch.Tensor, back: int) -> torch.Tensor:
    """Return values of tokens, 0 where the token `back` places before belongs to another sequence."""
    return values * (positions >= back).to(values.dtype)[:, None, None] if back else values

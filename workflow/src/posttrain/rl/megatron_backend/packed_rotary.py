"""Rotary embedding of a whole packed row at once.

Without a fused kernel (MLA's interleaved pairs, CPUs), Megatron rotates a row's sequences one by one: ten small
operations for each, in each layer, in forward, recomputation and backward. The results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch.utils.weak import WeakIdKeyDictionary


def rotate_packed_rows_at_once() -> None:
    """Patch Megatron's attention to rotate all sequences of a packed row together."""
    rope_utils._apply_rotary_pos_emb_thd = _rotate


def _rotate(
    heads: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *,
    cp_group: torch.distributed.ProcessGroup,
    **layout: Any,
) -> torch.Tensor:
    """Rotate `heads` [T, N, D] of this context-parallel rank by the angles [S, 1, 1, D_rope] of their positions."""
    if heads.device.type == "cpu" and not layout.get("rotary_interleaved"):
        factors = _factors_of(cu_seqlens, len(heads), freqs, cp_group, layout.get("mscale", 1.0), heads.dtype)
        return _Rotation.apply(heads, *factors, bool(layout.get("mla_rotary_interleaved")))
    positions = own_positions(cu_seqlens, len(heads), cp_group.rank(), cp_group.size())
    return rope_utils._apply_rotary_pos_emb_bshd(heads.unsqueeze(1), freqs[positions], **layout).squeeze(1)


@dataclass(frozen=True)
class _Factors:
    """Cosines and sines [T, 1, D_rope / 2], and what they were made from; it keeps the angles' memory from reuse."""

    made_from: tuple[Any, ...]
    freqs: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


# By a row's boundaries: queries and keys of all its layers share them.
_known_factors: MutableMapping[torch.Tensor, _Factors] = WeakIdKeyDictionary()


def _factors_of(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    freqs: torch.Tensor,
    cp_group: torch.distributed.ProcessGroup,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines [T, 1, D_rope / 2] of a row's tokens, times `scale`."""
    made_from = num_tokens, freqs.data_ptr(), freqs.shape, scale, dtype
    factors = _known_factors.get(cu_seqlens)
    if factors is None or factors.made_from != made_from:
        positions = own_positions(cu_seqlens, num_tokens, cp_group.rank(), cp_group.size())
        # Both halves of the angles are equal.
        angles = freqs[positions, 0, :, : freqs.shape[-1] // 2]
        cos, sin = ((part * scale).to(dtype) for part in (angles.cos(), angles.sin()))
        factors = _known_factors[cu_seqlens] = _Factors(made_from, freqs, cos, sin)
    return factors.cos, factors.sin


class _Rotation(torch.autograd.Function):
    """Rotates the first part of each head; in backward, the gradient by the opposite angles.

    Megatron's formula makes ten tensors of it, and autograd as many for its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
        _turn(_pairs(heads, cos, is_interleaved), _pairs(rotated, cos, False), cos, sin)
        rotated[..., 2 * cos.shape[-1] :] = heads[..., 2 * cos.shape[-1] :]
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        result = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _turn(_pairs(grad, cos, False), _pairs(result, cos, ctx.is_interleaved), cos, sin.neg())
        result[..., 2 * cos.shape[-1] :] = grad[..., 2 * cos.shape[-1] :]
        return result, None, None, None


def _pairs(heads: torch.Tensor, cos: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of both components of each head's pairs: neighbours, or a half each."""
    half = cos.shape[-1]
    if is_interleaved:
        return heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    return heads[..., :half], heads[..., half : 2 * half]


def _turn(
    given: tuple[torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Write the pairs, turned, to `result`."""
    real, imaginary = given
    torch.mul(real, cos, out=result[0]).sub_(imaginary * sin)
    torch.mul(imaginary, cos, out=result[1]).add_(real * sin)


def own_positions(cu_seqlens: torch.Tensor, num_tokens: int, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the position of each of a context-parallel rank's tokens in its sequence, without a device sync.

    Args:
        cu_seqlens: [number of sequences + 1] starts of all ranks' sequences, and the end of the last.
        num_tokens: T, this rank's tokens.
        rank: Context-parallel rank, with chunks `rank` and `2 num_ranks - 1 - rank` of each sequence.
        num_ranks: Context-parallel size.

    Returns:
        [T] int64.

    Example:
        Boundaries (0, 8), rank 0 of 2: positions (0, 1, 6, 7).
    """
    starts, lengths = cu_seqlens[:-1] // num_ranks, cu_seqlens.diff() // num_ranks
    sequence = torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths, output_size=num_tokens)
    index = torch.arange(num_tokens, device=cu_seqlens.device) - starts[sequence]
    chunk = (lengths // 2)[sequence]
    return index + torch.where(index < chunk, rank, 2 * (num_ranks - 1) - rank) * chunk if num_ranks > 1 else index

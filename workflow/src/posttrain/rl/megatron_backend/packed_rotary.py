"""Rotary embedding of a whole packed row at once.

Without a fused kernel (MLA's interleaved pairs, CPUs), Megatron rotates a row's sequences one by one: ten small
operations for each, in each layer, in forward, recomputation and backward. The results are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils


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
    positions = own_positions(cu_seqlens, len(heads), cp_group.rank(), cp_group.size())
    return rope_utils._apply_rotary_pos_emb_bshd(heads.unsqueeze(1), freqs[positions], **layout).squeeze(1)


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

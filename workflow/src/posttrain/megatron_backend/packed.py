"""Packed sequences: several of different length in one row of tokens, and the way to and from a padded block.

Shapes: B sequences, T tokens of the row, S longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class PackedSequences(PackedSeqParams):
    """What attention needs to know about a packed row; Megatron hands it to every layer unchanged.

    Args:
        position_ids: [T] int64, position of each token in its own sequence.
        padded_index: [T] int64, place of each token in a padded block of [B * S].
        num_sequences: B.
    """

    position_ids: torch.Tensor = None  # type: ignore[assignment]
    padded_index: torch.Tensor = None  # type: ignore[assignment]
    num_sequences: int = 0

    @staticmethod
    def from_boundaries(cu_seqlens: torch.Tensor) -> PackedSequences:
        """Describe a row by its boundaries.

        Args:
            cu_seqlens: [B + 1] int32, starts of the sequences and the end of the last.

        Example:
            Boundaries (0, 3, 5): positions (0, 1, 2, 0, 1), longest 3, padded places (0, 1, 2, 3, 4).
        """
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        longest = int(lengths.max())
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)
        position_ids = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - cu_seqlens[:-1].long()[owner]
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=position_ids,
            padded_index=owner * longest + position_ids,
            num_sequences=len(lengths),
        )

    def pad(self, row: torch.Tensor) -> torch.Tensor:
        """Spread `row` [T, ...] over a block [B, S, ...] whose missing places are zero."""
        block = row.new_zeros(self.num_sequences * self.max_seqlen_q, *row.shape[1:])
        return block.index_copy(0, self.padded_index, row).unflatten(0, (self.num_sequences, self.max_seqlen_q))

    def unpad(self, block: torch.Tensor) -> torch.Tensor:
        """Collect the tokens of a block [B, S, ...] into a row [T, ...]."""
        return block.flatten(0, 1).index_select(0, self.padded_index)

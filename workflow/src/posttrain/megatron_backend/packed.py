"""Packed sequences: several of different length in one row of tokens, and the way to and from blocks of equal length.

Attention works block by block. A block holds sequences that are about as long as each other, so that padding them to
the longest costs less than calling the kernels once more; a long sequence has a block of its own.

Shapes: B sequences of a block, S the longest of them, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

# Scores (query times key) whose computation takes about as long as the calls that a block of its own needs.
SCORES_PER_CALL = 128**2
# A block of several sequences has at most so many scores: they are held for all of its sequences at a time.
SCORES_PER_BLOCK = 2**20


@dataclass
class PackedSequences(PackedSeqParams):
    """What attention needs to know about a packed row; Megatron hands it to every layer unchanged.

    Args:
        position_ids: [T] int64, position of each token in its own sequence.
        places: [T] int64, place of each token in the blocks laid end to end; None where the row is that already.
        blocks: (B, S) of each block.
        kept_keys: Number of a layer -> what it lets each block attend to, for the layers that take it over.
    """

    position_ids: torch.Tensor = None  # type: ignore[assignment]
    places: torch.Tensor | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    kept_keys: dict[int, Sequence[Callable[[int, int], torch.Tensor]]] = field(default_factory=dict)

    @staticmethod
    def from_boundaries(cu_seqlens: torch.Tensor) -> PackedSequences:
        """Describe a row by its boundaries.

        Args:
            cu_seqlens: [number of sequences + 1] int32, their starts and the end of the last.

        Example:
            Boundaries (0, 3, 5): positions (0, 1, 2, 0, 1); one block of two sequences and three places each, which
            the tokens take as (0, 1, 2, 3, 4).
        """
        lengths = torch.diff(cu_seqlens).tolist()
        blocks = _blocks(lengths)
        starts, end = [0] * len(lengths), 0
        for members in blocks:
            longest = lengths[members[0]]
            for index in members:
                starts[index], end = end, end + longest
        positions = [torch.arange(length) for length in lengths]
        places = torch.cat([start + position for start, position in zip(starts, positions, strict=True)])
        in_order = end == len(places) and bool((torch.diff(places) == 1).all())
        longest = max(lengths)
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=torch.cat(positions).to(cu_seqlens.device),
            places=None if in_order else places.to(cu_seqlens.device),
            blocks=tuple((len(members), lengths[members[0]]) for members in blocks),
        )

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Spread `row` [T, ...] over blocks [B, S, ...] whose missing places are zero."""
        sizes = [size * longest for size, longest in self.blocks]
        if self.places is not None:
            row = row.new_zeros(sum(sizes), *row.shape[1:]).index_copy(0, self.places, row)
        parts = zip(row.split(sizes), self.blocks, strict=True)
        return [part.unflatten(0, block) for part, block in parts]

    def join(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Collect the tokens of blocks [B, S, ...] into a row [T, ...]."""
        row = torch.cat([block.flatten(0, 1) for block in blocks])
        return row if self.places is None else row.index_select(0, self.places)


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Put sequences of about the same length together, the longest first.

    Example:
        Lengths (10, 2000, 12, 1990): 2000 and 1990 waste 39,900 scores together, more than a call is worth: alone.
        10 and 12 share a block.
    """
    blocks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[blocks[-1][0]] if blocks else 0
        is_near = longest**2 - lengths[index] ** 2 <= SCORES_PER_CALL
        if blocks and is_near and (len(blocks[-1]) + 1) * longest**2 <= SCORES_PER_BLOCK:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks

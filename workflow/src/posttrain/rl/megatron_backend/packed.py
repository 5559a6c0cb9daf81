"""Packed sequences: several of different length in one row of tokens, and their conversion to and from padded blocks.

Attention works block by block. A block holds sequences of similar length, so that padding them to the longest costs
less than another kernel launch; a long sequence has its own block.

Shapes: B sequences per block, S the longest of them, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

# Attention scores (query times key) whose computation takes about as long as the launches of another block.
SCORES_PER_CALL = 128**2
# Most scores of a block with several sequences, because the scores of all its sequences exist at the same time.
SCORES_PER_BLOCK = 2**20


@dataclass(frozen=True)
class Spread:
    """Maps a row's tokens to padded blocks and back.

    Args:
        places: [T] int64, position of each token in the concatenated blocks; None if it equals that in the row.
        blocks: (B, S) of each block.
    """

    places: torch.Tensor | None
    blocks: tuple[tuple[int, int], ...]

    @staticmethod
    def to(places: torch.Tensor, blocks: Sequence[tuple[int, int]], device: torch.device) -> Spread:
        """Return the mapping to these positions; consecutive positions need no copy."""
        in_order = sum(size * longest for size, longest in blocks) == len(places) and bool((places.diff() == 1).all())
        return Spread(None if in_order else places.to(device), tuple(blocks))

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Spread `row` [T, ...] over blocks [B, S, ...], padded with zeros."""
        sizes = [size * longest for size, longest in self.blocks]
        if self.places is not None:
            row = row.new_zeros(sum(sizes), *row.shape[1:]).index_copy(0, self.places, row)
        parts = zip(row.split(sizes), self.blocks, strict=True)
        return [part.unflatten(0, block) for part, block in parts]

    def join(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gather the tokens of blocks [B, S, ...] into a row [T, ...]."""
        row = torch.cat([block.flatten(0, 1) for block in blocks])
        return row if self.places is None else row.index_select(0, self.places)


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Attention metadata of a packed row; Megatron passes it to every layer unchanged.

    Context-parallel ranks share a row. Each sequence is cut into two chunks per rank; rank r holds the r-th chunk from
    the start and the r-th from the end, which balances the causal scores. A rank has the queries of its own tokens;
    keys are gathered from all ranks.

    Tensor-parallel ranks choose keys for their own queries only, which are dealt to them in turn: rank r of n gets the
    tokens r, r + n, r + 2 n ... of the row. Contiguous parts would give the last rank most of a long sequence's causal
    pairs; in turn, each gets as many of every sequence, to within one query.

    Args:
        position_ids: [T_own] int64, position of each of this rank's tokens in its sequence.
        queries: Mapping of this rank's tokens to blocks, each with one chunk of some sequences.
        keys: Mapping of all ranks' tokens, concatenated by rank, to blocks of whole sequences.
        spans: For each block of queries (block of keys, number of keys up to the block's last query).
        own: [T_own] int64, this rank's tokens in the row; None: all.
        order: [T] int64, position of each of the row's tokens in the concatenation by rank; None: unchanged.
        turn: This rank's tensor-parallel rank r and their number n.
        dealt: Mapping of this rank's dealt tokens to blocks n times narrower than those of `queries`.
        choices: Layer number -> its choice of keys, for layers that reuse it and for recomputation (`glm5.choice`).
        is_differentiated: A backward pass follows.
        routes: Layer number -> experts of this rank's tokens [T_own, K], if the router does not choose them.
    """

    position_ids: torch.Tensor
    queries: Spread
    keys: Spread
    spans: tuple[tuple[int, int], ...] = ()
    own: torch.Tensor | None = None
    order: torch.Tensor | None = None
    turn: tuple[int, int]
    dealt: Spread
    choices: dict[int, torch.Tensor] = field(default_factory=dict)
    is_differentiated: bool = field(default_factory=torch.is_grad_enabled)
    routes: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def from_boundaries(
        cu_seqlens: torch.Tensor, rank: int = 0, num_ranks: int = 1, turn: tuple[int, int] = (0, 1)
    ) -> PackedSequences:
        """Build the metadata of a row from its sequence boundaries.

        Args:
            cu_seqlens: [number of sequences + 1] int32, their starts and the end of the last. With several ranks, each
                sequence's length must be divisible by `2 * num_ranks`.
            rank: This rank's context-parallel rank.
            num_ranks: Context-parallel size.
            turn: This rank's tensor-parallel rank and their number.

        Example:
            Boundaries (0, 3, 5): positions (0, 1, 2, 0, 1); one block of two sequences with three positions each, of
            which the tokens take (0, 1, 2, 3, 4). Boundaries (0, 8), rank 0 of 2: positions (0, 1, 6, 7); the first
            two see the first two keys, the others all eight.
        """
        device, lengths = cu_seqlens.device, cu_seqlens.diff().cpu().long()
        num_chunks = 2 * num_ranks if num_ranks > 1 else 1
        assert not (lengths % num_chunks).any(), "ranks that share a row have as many tokens of each sequence"
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        position = torch.cat([torch.arange(length) for length in lengths.tolist()])
        chunk = position // (lengths // num_chunks)[sequence]
        owner = torch.minimum(chunk, num_chunks - 1 - chunk)
        own, by_rank = (owner == rank).nonzero().squeeze(1), owner.argsort(stable=True)

        members = _blocks(lengths.tolist())
        starts, blocks, _ = _lay_out(lengths, members, 1, [0])
        keys = Spread.to((starts[0, sequence] + position)[by_rank], blocks, device)
        starts, blocks, spans = _lay_out(lengths, members, num_chunks, sorted({rank, num_chunks - 1 - rank}))
        places = (starts[(chunk >= num_ranks).long(), sequence] + position)[own]
        longest, is_shared = int(lengths.max()), num_ranks > 1
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            # Transformer Engine requires them under context parallelism; padding counts as part of its sequence.
            cu_seqlens_q_padded=cu_seqlens if is_shared else None,
            cu_seqlens_kv_padded=cu_seqlens if is_shared else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=position[own].to(device),
            queries=Spread.to(places, blocks, device),
            turn=turn,
            dealt=Spread.to(*_deal(places, blocks, *turn), device),
            keys=keys,
            spans=tuple(spans),
            own=own.to(device) if is_shared else None,
            order=by_rank.argsort().to(device) if is_shared else None,
        )

    def cut(self, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [T_own, ...] of a row [T, ...]."""
        return row if self.own is None else row[self.own]

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the row [T, ...] from each rank's tokens [T_own, ...]; collective.

        All ranks must compute the same from it: each rank's gradient counts as the gradient of all.
        """
        return own if self.order is None else _gather(own, is_used_alike=True).index_select(0, self.order)

    def gather_keys(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return for each block of queries [B, C, ...] its keys [B, S, ...]; collective.

        The last query and the last key have the same position; so query c may see the keys up to S - C + c.

        Args:
            own: [T_own, ...], keys or values of this rank's tokens.
        """
        return self._of_spans(self.gather_row(own))

    def gather_row(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tokens [T, ...] of all ranks, concatenated by rank; collective."""
        return own if self.order is None else _gather(own, is_used_alike=False)

    def first_keys(self) -> torch.Tensor:
        """Return for each of this rank's tokens [T_own] the place of its sequence's first token in the whole row."""
        own = torch.arange(len(self.position_ids), device=self.position_ids.device) if self.own is None else self.own
        return own - self.position_ids

    def _of_spans(self, row: torch.Tensor) -> list[torch.Tensor]:
        blocks = self.keys.split(row)
        return [blocks[index][:, :end] for index, end in self.spans]


def _gather(own: torch.Tensor, is_used_alike: bool) -> torch.Tensor:
    """All-gather tokens over context-parallel ranks; gradients return to their own rank."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=not is_used_alike, group=group)


def _lay_out(
    lengths: torch.Tensor, members: Sequence[Sequence[int]], num_chunks: int, chosen: Sequence[int]
) -> tuple[torch.Tensor, list[tuple[int, int]], list[tuple[int, int]]]:
    """Assign the tokens of some chunks to block positions; a block covers one range of positions of its sequences.

    Args:
        lengths: [number of sequences] int64.
        members: Sequences of each group, longest first.
        num_chunks: Equal chunks per sequence.
        chosen: Chunks that get blocks, in this order within each group.

    Returns:
        [chosen, sequences] block position of token 0, (B, S) of each block, (group, last position + 1) of each block.
    """
    starts, blocks, spans, end = torch.zeros(len(chosen), len(lengths), dtype=torch.int64), [], [], 0
    for group, sequences in enumerate(members):
        shortest, longest = (int(lengths[sequences[place]]) // num_chunks for place in (-1, 0))
        for row, chunk in enumerate(chosen):
            first, last = chunk * shortest, (chunk + 1) * longest
            starts[row, sequences] = end - first + torch.arange(len(sequences)) * (last - first)
            blocks.append((len(sequences), last - first))
            spans.append((group, last))
            end += len(sequences) * (last - first)
    return starts, blocks, spans


def _deal(
    places: torch.Tensor, blocks: Sequence[tuple[int, int]], turn: int, num_turns: int
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the block positions of every `num_turns`-th token, from `turn` on, in blocks as many times narrower.

    Args:
        places: [T] int64, position of each token in the concatenated blocks.
        blocks: (B, S) of each block.
        turn: First token.
        num_turns: Step.

    Example:
        Sequences of 4 and 3 tokens in a block (2, 4), two turns: turn 1 has the tokens 1, 3 and 5, the first two in
        the first row of a block (2, 2), and token 5, position 1 of the second sequence, at its place 2.
    """
    sizes, widths = torch.tensor(blocks).unbind(1)
    narrow = -(-widths // num_turns)
    dealt = places[turn::num_turns]
    block = torch.searchsorted((sizes * widths).cumsum(0), dealt, right=True)
    within = dealt - _starts(sizes * widths)[block]
    sequence, column = within // widths[block], within % widths[block]
    new = _starts(sizes * narrow)[block] + sequence * narrow[block] + column // num_turns
    return new, list(zip(sizes.tolist(), narrow.tolist(), strict=True))


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.cumsum(0) - sizes


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length, longest first.

    Example:
        Lengths (10, 2000, 12, 1990): 2000 and 1990 together would waste 39,900 scores, more than a launch costs, so
        each has its own block. 10 and 12 share one.
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

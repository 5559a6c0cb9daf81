"""Rows as blocks and back, by hand and for any lengths; imports no model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.rl.megatron_backend import packed
from posttrain.rl.megatron_backend.glm5 import sparse_attention
from posttrain.rl.megatron_backend.glm5.choice import causal_places
from posttrain.rl.megatron_backend.glm5.sparse_attention import attend, attend_in_chunks, mask_of_places
from posttrain.rl.megatron_backend.packed import PackedSequences


def described(lengths: list[int], rank: int = 0, num_ranks: int = 1) -> PackedSequences:
    return PackedSequences.from_boundaries(torch.tensor([0, *lengths]).cumsum(0).int(), rank, num_ranks)


def test_sequences_of_about_one_length_share_a_block():
    row = described([10, 2000, 12, 1990, 1999])
    # 2000**2 - 1999**2 is 3,999 scores, less than a call is worth; but three such squares are too many for a block.
    assert row.queries.blocks == ((1, 2000), (1, 1999), (1, 1990), (2, 12))
    assert row.max_seqlen_q == 2000


def test_a_block_by_hand():
    row = described([2, 3])
    assert row.queries.blocks == ((2, 3),)
    (block,) = row.queries.split(torch.tensor([1, 2, 3, 4, 5]))
    assert block.tolist() == [[3, 4, 5], [1, 2, 0]]
    assert row.queries.join([block]).tolist() == [1, 2, 3, 4, 5]


def test_a_row_of_equal_lengths_is_not_copied():
    row = described([4, 4, 4])
    tokens = torch.arange(12)
    (block,) = row.queries.split(tokens)
    assert (row.queries.places, block.shape) == (None, (3, 4))
    assert block.data_ptr() == tokens.data_ptr()


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_every_token_comes_back_and_little_is_wasted(lengths):
    row = described(lengths)
    tokens = torch.arange(1, sum(lengths) + 1)
    blocks = row.queries.split(tokens)
    assert torch.equal(row.queries.join(blocks), tokens)
    assert sorted((sequence > 0).sum().item() for block in blocks for sequence in block) == sorted(lengths)
    assert row.position_ids.tolist() == [place for length in lengths for place in range(length)]
    scores = sum(size * longest**2 for size, longest in row.queries.blocks)
    assert scores - sum(length**2 for length in lengths) <= len(lengths) * 128**2
    assert all(size == 1 or size * longest**2 <= 2**20 for size, longest in row.queries.blocks)


def test_two_ranks_share_a_row_by_hand():
    """Sequences of 8 and 4 tokens, in chunks of two and one: rank 0 has the first and the last of each."""
    first, second = described([8, 4], 0, 2), described([8, 4], 1, 2)
    row = torch.arange(12)
    assert first.cut(row).tolist() == [0, 1, 6, 7, 8, 11]
    assert second.cut(row).tolist() == [2, 3, 4, 5, 9, 10]
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 1, 2]
    # Both sequences share blocks: early chunks of queries from position 0 or 1 on, late ones from 2 or 3 on.
    assert (first.queries.blocks, first.spans) == (((2, 2), (2, 5)), ((0, 2), (0, 8)))
    assert (second.queries.blocks, second.spans) == (((2, 3), (2, 4)), ((0, 4), (0, 6)))
    assert first.max_seqlen_q == second.max_seqlen_q == 8
    assert first.cu_seqlens_q_padded.tolist() == [0, 8, 12]


def test_a_sequence_that_cannot_be_shared_is_refused():
    with pytest.raises(AssertionError, match="as many tokens of each sequence"):
        described([8, 6], 0, 2)


class Ranks:
    """Ranks one after the other: what each would gather is known from the whole row."""

    def __init__(self, lengths: list[int], num_ranks: int, monkeypatch: pytest.MonkeyPatch):
        self.rows = [described(lengths, rank, num_ranks) for rank in range(num_ranks)]
        monkeypatch.setattr(packed, "_gather", self._gather)
        self._whole: torch.Tensor | None = None

    def _gather(self, own: torch.Tensor, is_used_alike: bool) -> torch.Tensor:
        return torch.cat([row.cut(self._whole) for row in self.rows])

    def gathered(self, row: PackedSequences, whole: torch.Tensor) -> list[torch.Tensor]:
        self._whole = whole
        return row.gather_keys(row.cut(whole))

    def whole(self, own: list[torch.Tensor]) -> torch.Tensor:
        order = torch.cat([row.cut(torch.arange(sum(len(part) for part in own))) for row in self.rows])
        return torch.cat(own)[order.argsort()]


@pytest.mark.parametrize("lengths", [[12], [24, 12], [12, 240, 24, 228, 132, 24]], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_heads", [1, 2], ids=["grouped", "plain"])
def test_ranks_that_share_a_row_attend_as_one(lengths, num_ranks, num_heads, monkeypatch):
    generator = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(sum(lengths), 2, 8, generator=generator)
    key, value = (torch.randn(sum(lengths), num_heads, 8, generator=generator) for _ in range(2))
    ranks, outputs = Ranks(lengths, num_ranks, monkeypatch), []
    for row in ranks.rows:
        keys, values = ranks.gathered(row, key), ranks.gathered(row, value)
        blocks = zip(row.queries.split(row.cut(query)), keys, values, strict=True)
        outputs.append(row.queries.join([attend(*block, None, None) for block in blocks]))
    assert (ranks.whole(outputs) - dense(query, key, value, lengths)).abs().max() <= 1e-6


def dense(query, key, value, lengths) -> torch.Tensor:
    """Return causal attention by its definition, each sequence for itself."""
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("snd,tnd->nst", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
        outputs.append(torch.einsum("nst,tnd->snd", scores.softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize("num_dense", [0, 3, 7, 9, 12])
def test_the_last_queries_in_chunks_are_those_of_all(num_dense, monkeypatch):
    """Where every key is chosen, sparse attention of positions 5 to 11 is dense; in chunks of at most 3 queries."""
    query, key, value = torch.randn(3, 2, 12, 2, 8, generator=torch.Generator().manual_seed(1))
    asked = []

    def mask(places: torch.Tensor, num_keys: int) -> torch.Tensor:
        asked.append((num_keys - places.shape[1], num_keys))
        return mask_of_places(places, num_keys)

    monkeypatch.setattr(sparse_attention, "mask_of_places", mask)
    places = causal_places(torch.arange(5, 12), 12, torch.int16).expand(2, -1, -1)
    whole = attend(query, key, value, None, 0.5)
    last = attend_in_chunks(query[:, 5:], key, value, places, num_dense, 0.5, chunk_tokens=3)
    assert (last - whole[:, 5:]).abs().max() <= 1e-6
    # Dense positions that fill a chunk have a call of their own.
    expected = {9: [(9, 12)], 12: []}.get(num_dense, [(5, 8), (8, 11), (11, 12)])
    assert asked == expected


class Largest(TorchDispatchMode):
    """Remembers the largest storage that an operation has made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


def test_the_last_queries_need_no_mask_of_their_scores():
    query, key = torch.randn(1, 500, 1, 8, requires_grad=True), torch.randn(1, 2000, 1, 8, requires_grad=True)
    with Largest() as largest:
        attend(query, key, key, None, None).sum().backward()
    # Keys are 64 kB, a mask of all scores would be 4 MB.
    assert 2000 * 8 * 4 <= largest.num_bytes <= 4 * 2000 * 8 * 4

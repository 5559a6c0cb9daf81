"""Rows as blocks and back, by hand and for any lengths; imports no model."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.megatron_backend.packed import PackedSequences


def described(lengths: list[int]) -> PackedSequences:
    return PackedSequences.from_boundaries(torch.tensor([0, *lengths]).cumsum(0).int())


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

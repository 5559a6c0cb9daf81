"""A choice of keys that later layers take over."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import pytest
import torch

from posttrain.rl.megatron_backend.glm5.sparse_attention import KeptKeys, causal_mask, pack_bits, unpack_bits


@pytest.mark.parametrize("size", [1, 7, 8, 9, 35])
def test_a_choice_is_held_as_bits(size: int) -> None:
    mask = torch.rand(2, 3, size, generator=torch.Generator().manual_seed(size)) < 0.5
    octets = pack_bits(mask)
    assert octets.shape == (2, 3, -(-size // 8))
    assert octets.tolist() == np.packbits(mask.numpy(), axis=-1, bitorder="little").tolist()
    assert torch.equal(unpack_bits(octets, size), mask)


def test_a_choice_is_made_once() -> None:
    made = []

    def select(first: int, end: int) -> torch.Tensor:
        made.append((first, end))
        return causal_mask(first, end - first, end, torch.device("cpu"))[None]

    kept = KeptKeys(select)
    masks = [kept(first, end) for first, end in ((0, 3), (3, 9), (3, 9), (0, 3))]
    assert made == [(0, 3), (3, 9)]
    assert torch.equal(masks[1], masks[2])
    assert masks[3].tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]


def test_what_a_choice_is_made_from_is_let_go_of() -> None:
    def select(row: torch.Tensor, first: int, end: int) -> torch.Tensor:
        return row[:, first:end, :end].clone()

    row = torch.ones(1, 4, 4, dtype=torch.bool)
    kept, held = KeptKeys(partial(select, row)), weakref.ref(row)
    kept(0, 4)
    del row
    assert held() is not None
    kept.close()
    assert held() is None
    assert kept(0, 4).all()
    with pytest.raises(AssertionError, match="no layer before has chosen keys for the queries 4 to 8"):
        kept(4, 8)

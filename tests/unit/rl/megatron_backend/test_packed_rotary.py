"""Rotary positions of a packed row against Megatron's own, which takes one sequence after the other."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from posttrain.rl.megatron_backend import packed_rotary

LENGTHS = (8, 24, 4, 16)
BY_SEQUENCE = rope_utils._apply_rotary_pos_emb_thd


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("layout", [{}, {"mla_rotary_interleaved": True, "mscale": 1.3}, {"rotary_interleaved": True}])
def test_same_bits_as_one_sequence_after_the_other(rank, num_ranks, layout):
    boundaries = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    group = SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(sum(LENGTHS) // num_ranks, 3, 10, generator=generator)
    freqs = torch.outer(torch.arange(max(LENGTHS)), torch.tensor([1, 0.3, 0.1])).repeat(1, 2)[:, None, None]
    results = []
    for rotate in (BY_SEQUENCE, packed_rotary._rotate):
        leaf = heads.clone().requires_grad_()
        rotated = rotate(leaf, boundaries, freqs, cp_group=group, **layout)
        rotated.square().mul(heads).sum().backward()
        results.append((rotated, leaf.grad))
    for expected, ours in zip(*results, strict=True):
        assert torch.equal(expected, ours)


def test_megatrons_attention_uses_it(monkeypatch):
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", BY_SEQUENCE)
    packed_rotary.rotate_packed_rows_at_once()
    boundaries, heads = torch.tensor([0, 2, 4]).int(), torch.ones(4, 1, 2)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
    rotated = rope_utils.apply_rotary_pos_emb(heads, torch.ones(2, 1, 1, 2), config, boundaries, cp_group=group)
    assert rope_utils._apply_rotary_pos_emb_thd is packed_rotary._rotate
    assert torch.equal(rotated[:2], rotated[2:])

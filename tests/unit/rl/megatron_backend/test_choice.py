"""A choice of keys as places: by hand, and dealt to ranks, which together choose as one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posttrain.rl.megatron_backend import packed
from posttrain.rl.megatron_backend.glm5 import dealing, fused_indexer, sparse_attention
from posttrain.rl.megatron_backend.glm5 import indexer as indexer_module
from posttrain.rl.megatron_backend.glm5.choice import causal_places, choose_in_chunks, places_dtype, places_of_mask
from posttrain.rl.megatron_backend.glm5.indexer import Indexer
from posttrain.rl.megatron_backend.glm5.latent_space import places_in_row
from posttrain.rl.megatron_backend.glm5.sparse_attention import mask_of_places
from posttrain.rl.megatron_backend.packed import PackedSequences

SIZES = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 6, "attention_chunk_tokens": 8}
SIZES |= {"q_lora_rank": 12, "hidden_size": 20}
# One sequence; several in one block; blocks of one and of several; one shorter than the choice, one of a token a rank.
LENGTHS = [[64], [24, 16, 24], [200, 16, 136, 8, 24, 24]]


def settings(**sizes) -> SimpleNamespace:
    others = {"dsa_indexer_rope_interleaved": True, "params_dtype": torch.float32, "sequence_parallel": True}
    return SimpleNamespace(**{"indexer_kernel": "torch"} | others | sizes)


def make_indexer() -> Indexer:
    indexer, generator = Indexer(settings(**SIZES)), torch.Generator().manual_seed(1)
    for parameter in indexer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return indexer


def row_of(lengths: list[int], context=(0, 1), turn=(0, 1)) -> PackedSequences:
    return PackedSequences.from_boundaries(torch.tensor([0, *lengths]).cumsum(0).int(), *context, turn)


def test_places_by_hand():
    keep = torch.tensor([[[True, False, True, False], [True, True, False, True]]])
    places = places_of_mask(keep, 3, torch.int16)
    assert places.tolist() == [[[0, 2, -1], [0, 1, 3]]]
    assert places.dtype == torch.int16
    assert torch.equal(mask_of_places(places, 4), keep)
    assert causal_places(torch.tensor([[0, 2]]), 3, torch.int16).tolist() == [[[0, -1, -1], [0, 1, 2]]]
    assert (places_dtype(2**15), places_dtype(2**15 + 1)) == (torch.int16, torch.int32)


def test_the_kernels_that_the_plan_has_chosen_choose_for_more_queries_at_once(monkeypatch):
    """The operators without a device: of 64 queries 4 x 8 at a time, each with the keys before the last of them."""
    asked = []

    def places(queries, keys, weights, first, end, topk):
        asked.append((len(queries), len(keys), queries.dtype, weights.dtype, end[-1].item()))
        return torch.zeros(len(queries), topk, dtype=torch.int32)

    monkeypatch.setattr(fused_indexer, "choose_places", places)
    indexer, row = Indexer(settings(**SIZES, indexer_kernel="fused", params_dtype=torch.bfloat16)), row_of([64])
    queries, keys = torch.randn(64, 4, 8).bfloat16(), torch.randn(64, 8).bfloat16()
    chosen = indexer._choose((queries, torch.randn(64, 4), row.position_ids), keys, row)
    assert asked == [(32, size, torch.bfloat16, torch.float32, size) for size in (32, 64)]
    assert (chosen.shape, chosen.dtype) == ((64, 6), torch.int16)


def test_equal_scores_keep_the_lower_places():
    queries, keys = torch.zeros(1, 9, 2, 4), torch.zeros(1, 9, 4)
    chosen = choose_in_chunks(
        queries, torch.ones(1, 9, 2), torch.arange(9)[None], keys, 0, 1, 3, chunk_tokens=4, dtype=torch.int16
    )
    assert chosen[0, :4].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2]]
    assert (chosen[0, 4:] == torch.arange(3)).all()


def test_tokens_are_dealt_in_turn_by_hand():
    """Sequences of four and three tokens in a block: rank 1 of 2 has tokens 1, 3 and 5, two of them of the first."""
    row = row_of([4, 3, 1], turn=(1, 2))
    assert (row.queries.blocks, row.dealt.blocks) == (((3, 4),), ((3, 2),))
    assert row.dealt.split(torch.tensor([1, 3, 5, 7]))[0].tolist() == [[1, 3], [5, 0], [7, 0]]


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 6, 8])
def test_shards_are_dealt_whatever_their_size(turn, size, monkeypatch):
    """Ranks one after the other: what the others send is known from the whole row."""
    whole = torch.arange(4 * size)
    monkeypatch.setattr(dealing.parallel_state, "get_tensor_model_parallel_group", lambda: None)

    def deal_of(rank: int, exchange) -> torch.Tensor:
        monkeypatch.setattr(dealing.parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(dealing.dist, "all_to_all_single", exchange)
        return dealing.deal(whole[rank * size : (rank + 1) * size], 4)

    sent = {}
    for rank in range(4):
        deal_of(rank, lambda _, given, __, sizes, group, rank=rank: sent.update({rank: given.split(sizes)}))

    def exchange(output, _, sizes, __, group):
        arriving = [sent[other][turn] for other in range(4)]
        assert [len(part) for part in arriving] == sizes
        output.copy_(torch.cat(arriving))

    assert deal_of(turn, exchange).tolist() == whole[turn::4].tolist()


def test_what_was_dealt_is_gathered_in_order(monkeypatch):
    whole = torch.arange(24, dtype=torch.int16).view(8, 3)
    sent = []

    def gather(gathered, own, group):
        sent.append(own.dtype)
        gathered.copy_(torch.cat([whole[rank::4].contiguous().view(torch.uint8) for rank in range(4)]))

    monkeypatch.setattr(dealing.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(dealing.dist, "all_gather_into_tensor", gather)
    assert torch.equal(dealing.gather_dealt(whole[2::4], 4), whole)
    assert sent == [torch.uint8], "NCCL and gloo have no 16-bit integers"


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("num_context", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_choose_what_one_chooses(lengths, num_context, num_ranks, monkeypatch):
    """Scores that are near each other would let the ranks differ: the seed has none."""
    lengths = [length * num_ranks // 2 for length in lengths]
    indexer, generator = make_indexer(), torch.Generator().manual_seed(2)
    queries, keys = (torch.randn(sum(lengths), *size, generator=generator) for size in ((4, 8), (8,)))
    weights = torch.randn(sum(lengths), 4, generator=generator)
    whole = row_of(lengths)
    expected = indexer._choose((queries, weights, whole.position_ids), keys, whole)
    for rank in range(num_context):
        rows = [row_of(lengths, (rank, num_context), (turn, num_ranks)) for turn in range(num_ranks)]
        parts = [row_of(lengths, (other, num_context)).cut(keys) for other in range(num_context)]
        monkeypatch.setattr(packed, "_gather", lambda own, is_used_alike, parts=parts: torch.cat(parts))
        for turn, row in enumerate(rows):
            dealt = (row.cut(t)[turn::num_ranks] for t in (queries, weights, whole.position_ids))
            chosen = indexer._choose(tuple(dealt), row.cut(keys), row)
            assert torch.equal(chosen, row.cut(expected)[turn::num_ranks])


@pytest.mark.parametrize("num_context", [1, 2])
def test_places_in_the_gathered_row(num_context):
    lengths = [24, 16, 8]
    whole = row_of(lengths)
    tokens = torch.arange(sum(lengths))
    gathered = torch.cat([row_of(lengths, (rank, num_context)).cut(tokens) for rank in range(num_context)])
    for rank in range(num_context):
        row = row_of(lengths, (rank, num_context))
        places = torch.where(torch.arange(9) <= row.position_ids[:, None], torch.arange(9), -1).short()
        found = places_in_row(places, row.first_keys(), row.order, chunk_tokens=5)
        assert found.dtype == torch.int32
        assert torch.equal(found < 0, places < 0)
        expected = row.cut(tokens - whole.position_ids)[:, None] + places
        assert torch.equal(gathered[found.clamp_min(0)][places >= 0], expected[places >= 0])


# GLM-5's, on rows of 32,768 tokens.
GLM5 = {
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "q_lora_rank": 2048,
    "hidden_size": 6144,
    "attention_chunk_tokens": 1024,
}


@pytest.mark.parametrize("lengths", [[32768], [16384, 9216, 5120, 2048]], ids=["one", "unequal"])
@pytest.mark.parametrize("num_context", [1, 2])
def test_the_busiest_of_four_ranks_does_a_quarter(lengths, num_context, monkeypatch):
    """Floating-point operations of projections and scores, counted over tensors without values."""
    monkeypatch.setattr(sparse_attention, "CACHED_SCORES", 2**40)  # chunks as on a GPU
    monkeypatch.setattr(dealing, "_all_gather", lambda own, num_ranks: own.repeat(num_ranks, 1))
    monkeypatch.setattr(indexer_module, "deal", lambda shard, num_ranks: shard.clone())
    monkeypatch.setattr(packed, "_gather", lambda own, is_used_alike: own.repeat(num_context, 1))
    alone = max(counted(lengths, (rank, num_context), (0, 1)) for rank in range(num_context))
    shared = [counted(lengths, (rank, num_context), (turn, 4)) for rank in range(num_context) for turn in range(4)]
    assert max(shared) <= alone / 3.6
    pairs = 2 * 32 * 128 * sum(length * (length + 1) // 2 for length in lengths) / num_context
    assert alone >= 0.9 * pairs, "scores are counted, but those of the first queries"


def counted(lengths: list[int], context: tuple[int, int], turn: tuple[int, int]) -> int:
    """Return what one rank's indexer multiplies."""
    row = without_values(row_of(lengths, context, turn))
    tokens = len(row.position_ids) // turn[1]
    with torch.device("meta"), FlopCounterMode(display=False) as flops:
        indexer = Indexer(settings(**GLM5))
        chosen = indexer.choose(torch.empty(tokens, 6144), torch.empty(tokens, 2048), torch.empty(32768, 32), row)
    assert chosen.shape == (tokens, 2048)
    return flops.get_total_flops()


def without_values(row: PackedSequences) -> PackedSequences:
    spreads = {name: getattr(row, name) for name in ("queries", "keys", "dealt")}
    moved = {
        name: dataclasses.replace(spread, places=None if spread.places is None else spread.places.to("meta"))
        for name, spread in spreads.items()
    }
    return dataclasses.replace(row, position_ids=row.position_ids.to("meta"), **moved)

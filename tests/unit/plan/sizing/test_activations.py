"""Terms of the table in `sizing.activations`, of small models by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from posttrain.config.families import chooses_keys
from posttrain.config.schema import Config
from posttrain.plan.sizing.activations import (
    MicroBatch,
    Row,
    forward_bytes,
    fullest_micro_batch,
    longest_sample,
    saved_bytes,
    stage_activations,
)
from posttrain.plan.sizing.assumptions import ASSUMPTIONS

# Two sequences of 60 tokens, attended to 16 queries at a time.
BATCH = MicroBatch(120, 2, 60)
EVENLY = dataclasses.replace(ASSUMPTIONS, expert_imbalance=1.5)


def changed(config: Config, section: str, **values: Any) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def small(resolved: Any, dtype: str = "bf16", model: str = "tiny", **trainer: Any) -> Config:
    """Return a model with trainer settings: of tiny 64 hidden, 4 heads of 16 + 8, values of 16, latents of 48, 32."""
    trainer = {"attention_chunk_tokens": 16, "log_probs_chunk_size": 50, "recompute_granularity": "none", **trainer}
    return changed(resolved(model).config, "trainer", params_dtype=dtype, **trainer)


def row_of(config: Config, cuts: tuple[int, int, int] = (1, 1, 1), batch: MicroBatch = BATCH, **arch: int) -> Row:
    model = dataclasses.replace(config.model.architecture, **arch)
    return Row(model, config.trainer, cuts, batch, EVENLY.expert_imbalance)


def norm(width: int, p: int) -> int:
    return p * width + 4


def test_a_layer_of_latents_with_chosen_keys(resolved) -> None:
    """TP2: 60 tokens of this rank in sequence-parallel parts, 2 heads, queries of 48, values of 32."""
    row = row_of(small(resolved), cuts=(2, 1, 1))
    projections = 60 * (sum(norm(width, 2) + 2 * width for width in (64, 48, 32)) + 2 * 8)
    heads = 120 * (48 + 32) + 120 * (48 + 32)
    blocks = 120 * (48 + 48) + 120 * 2 * 48
    masked = 2 * (16 * 16 + 16 * 32 + 16 * 48 + 12 * 60)
    attention = projections + 2 * (heads + blocks) + 4 * 2 * 120 + 2 * masked
    inputs = 60 * (norm(64, 2) + 2 * 64)
    assert row.layer(0) == attention + inputs + 120 * 2 * 5 * 128 / 2
    router = 60 * (4 * 8 + 8 * 2 + 4 * 2 + 4 + 8 + 4 * 8 + 8 * 2)
    routed = 60 * 2 * 1.5 * (2 * 64 + 4 + 2 * 6 * 32)
    assert row.layer(1) == row.layer(3) == attention + inputs + 120 * 2 * 5 * 32 / 2 + router + routed
    assert [row.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    assert row.kept_choice(range(4), 4) == 0
    shared = row_of(small(resolved), cuts=(2, 1, 1), index_topk_freq=2)
    assert shared.kept_choice(range(4), 0) == 60 * 8 * 2 * sum(chooses_keys(shared.arch, layer) for layer in range(4))
    kept = row_of(small(resolved, keep_index_choice="all"), cuts=(2, 1, 1))
    assert [kept.kept_choice(range(4), number) for number in (0, 3)] == [0, 60 * 8 * 2 * 3]


def test_ranks_that_share_a_row_or_an_expert(resolved) -> None:
    """CP2 and ETP2 without TP: 60 tokens of 120, all keys; ranks gather each other's rows of half an expert."""
    row = row_of(small(resolved), cuts=(1, 2, 2))
    projections = 60 * (sum(norm(width, 2) + 2 * width for width in (64, 48, 32)) + 2 * 8)
    heads = 60 * (96 + 64) + 120 * (96 + 64)
    blocks = 60 * (96 + 96) + 120 * 2 * 96
    masked = 256 + 512 + 768 + 720
    attention = projections + 2 * (heads + blocks) + 4 * 4 * 60 + 2 * masked
    inputs = 60 * (norm(64, 2) + 2 * 64)
    router = 60 * (4 * 8 + 8 * 2 + 4 * 2 + 4 + 8 + 4 * 8 + 8 * 2)
    routed = 60 * 2 * 2 * 1.5 * (2 * 64 + 4 + 2 * 6 * 16)
    assert row.layer(1) == attention + inputs + 60 * 2 * 5 * 32 + router + routed
    assert row.dispatch() == 2 * 64 * 2 * (60 * 2 + 60 * 2 * 2 * 1.5)


def test_queries_that_see_few_keys_have_no_mask(resolved) -> None:
    """FP32, 8 queries at a time: the first 20 see all keys before them; a row is its own FP32 copy with its key."""
    config = small(resolved, "fp32", attention_chunk_tokens=8)
    plain = row_of(config, index_topk=60).layer(0)
    chosen = row_of(config, index_topk=20).layer(0)
    pairs = sum(8 * end for end in (28, 36, 44, 52, 60))
    assert chosen - plain == 4 * 2 * pairs
    assert row_of(config, index_topk=59).is_selected()
    assert not row_of(config, index_topk=60).is_selected()
    assert not row_of(config, index_n_heads=0).is_selected()
    projections = 120 * (sum(norm(width, 4) + 4 * width for width in (64, 48, 32)) + 4 * 8)
    heads, blocks = 120 * (96 + 64) * 2, 120 * (2 * 96 + 2 * 96)
    inputs, mlp = 120 * (norm(64, 4) + 4 * 64), 120 * 4 * 5 * 128
    assert plain == projections + 4 * (heads + blocks) + 4 * 4 * 120 + inputs + mlp


def test_a_layer_of_grouped_queries(resolved) -> None:
    """Qwen3-4B over TP4: 8 of 32 heads of 128, 2 of 8 of keys and of values, a fourth of 9,728."""
    row = row_of(small(resolved, model="qwen3_4b"), cuts=(4, 1, 1))
    query, key = 8 * 128, 2 * 128
    attention = 30 * (norm(2560, 2) + 2 * 2560) + 2 * 120 * (2 * query + 2 * key) + 2 * 120 * (2 * query + 2 * key)
    mlp = 120 * 2 * 5 * 9728 / 4
    assert row.layer(0) == attention + 4 * 8 * 120 + 30 * (norm(2560, 2) + 2 * 2560) + mlp
    assert row.widths(row._kinds[0]) == (query, 2 * key, query)


def test_what_scores_take_while_keys_are_chosen(resolved) -> None:
    """Per pair products of 4 heads twice, and 20 bytes; of as many sequences at a time as have 2**20 scores."""
    per_score = 2 * 4 * 4 + 2 * 4 + 8 + 4
    config = small(resolved)
    assert row_of(config).scored_pairs() == 2 * 16 * 60
    assert row_of(config).selection_chunk() == per_score * 2 * 16 * 60
    assert row_of(config, index_topk=60).selection_chunk() == 0
    # Two sequences of 800 have more, and are scored one by one; one alone is never too large.
    assert row_of(config, batch=MicroBatch(1600, 2, 800)).scored_pairs() == 16 * 800
    assert row_of(config, batch=MicroBatch(4000, 2, 2000)).scored_pairs() == 16 * 2000
    # No more queries than there are on this rank.
    assert row_of(config, cuts=(1, 8, 1)).scored_pairs() == 15 * 60
    # Tensor-parallel ranks score their own queries, and keep the places of their keys: 16 bits up to 32,768 tokens.
    assert row_of(config, cuts=(4, 1, 1)).scored_pairs() == 2 * 4 * 60
    rows = (row_of(config, cuts=(4, 1, 1), batch=MicroBatch(size, 1, size)) for size in (2**15, 2**15 + 4))
    assert [row.choice() for row in rows] == [2 * 2**13 * 8, 4 * (2**13 + 1) * 8]


@pytest.mark.parametrize(("dtype", "narrow"), [("bf16", 2), ("fp32", 0)])
def test_both_ends_of_a_model(resolved, dtype: str, narrow: int) -> None:
    config = small(resolved, dtype)
    row, p = row_of(config, cuts=(2, 1, 1)), 2 if narrow else 4
    assert row.first_edge() == 120 * (8 + 1)
    assert row_of(config).first_edge() == 120 * 8
    assert row.last_edge() == 60 * norm(64, p) + 120 * (p * 64 + 8)
    assert row.logprob_chunk() == 32 * ((50 + 64) * (4 + narrow) + 50 * 4 / 16)
    few = row_of(config, batch=MicroBatch(40, 1, 40))
    assert few.logprob_chunk() == 64 * ((40 + 64) * (4 + narrow) + 40 * 4 / 16)


def test_what_a_chunk_of_layers_keeps(resolved) -> None:
    """Whole layers with places of the row, or the inputs of those that are computed again."""
    row, whole = row_of(small(resolved)), range(4)
    inputs, edges = 120 * 2 * 64, row.first_edge() + row.last_edge()
    kept = sum(row.layer(layer) for layer in whole)
    assert saved_bytes(small(resolved), whole, BATCH, 1.5) == int(kept + 8 * 120 + edges)
    assert saved_bytes(small(resolved), range(1, 3), BATCH, 1.5) == int(row.layer(1) + row.layer(2) + 8 * 120)
    assert saved_bytes(small(resolved), range(2), BATCH, 1.5) == int(
        row.layer(0) + row.layer(1) + 8 * 120 + row.first_edge()
    )
    uniform = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for number, chunks in ((1, 4), (2, 2), (3, 2), (4, 1)):
        config = small(resolved, recompute_num_layers=number, **uniform)
        assert saved_bytes(config, whole, BATCH, 1.5) == int(chunks * inputs + edges)
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    config = small(resolved, recompute_num_layers=3, **block)
    assert saved_bytes(config, whole, BATCH, 1.5) == int(3 * inputs + row.layer(3) + 8 * 120 + edges)
    assert saved_bytes(config, range(1, 3), BATCH, 1.5) == 2 * inputs, "no more than there are"
    # Layers that hand their choice on keep it.
    arch = dataclasses.replace(config.model.architecture, index_topk_freq=2)
    sharing = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=arch))
    choice = 120 * 8 * 2
    assert saved_bytes(sharing, range(1, 3), BATCH, 1.5) == int(2 * inputs + choice)


def test_what_exists_while_a_chunk_is_computed_again(resolved) -> None:
    uniform = {"recompute_granularity": "full", "recompute_method": "uniform"}
    row = row_of(small(resolved))
    # The largest weights are gate and up of all experts; one's gradient is beside the buffer.
    needed = {
        number: stage_activations(small(resolved, recompute_num_layers=number, **uniform), 0, [range(4)], BATCH, EVENLY)
        for number in (1, 2)
    }
    assert needed[2].working - needed[1].working == pytest.approx(row.layer(1))
    none = stage_activations(small(resolved), 0, [range(4)], BATCH, EVENLY)
    assert needed[1].working - none.working == pytest.approx(row.layer(1))
    assert none.working == row.selection_chunk() + 2 * 128 * 64
    assert none.logprobs == row.logprob_chunk()
    assert none.dispatch == row.dispatch()
    dense = stage_activations(small(resolved, model="qwen3_4b"), 0, [range(36)], BATCH, EVENLY)
    assert dense.dispatch == 0
    assert forward_bytes(small(resolved), range(4), BATCH, EVENLY) == max(row.layer(0), row.layer(1)) + (
        row.selection_chunk()
    )
    assert forward_bytes(small(resolved), [], BATCH, EVENLY) == row.selection_chunk()


def test_the_fullest_row_is_filled_with_the_longest_samples(resolved) -> None:
    config = changed(small(resolved), "rollout", max_response_tokens=100, max_prompt_tokens=20)
    assert longest_sample(config, ASSUMPTIONS) == 120
    assert longest_sample(changed(config, "rollout", max_prompt_tokens=0), ASSUMPTIONS) == 125
    config = changed(config, "trainer", max_tokens_per_gpu=250)
    assert fullest_micro_batch(config, ASSUMPTIONS) == MicroBatch(250, 3, 120)

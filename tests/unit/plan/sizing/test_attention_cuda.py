"""Terms of the table in `sizing.attention_cuda`, of small models by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.config.families import chooses_keys
from posttrain.plan.sizing.activations import MicroBatch, Row
from posttrain.plan.sizing.attention_cuda import Attention, Layer
from posttrain.plan.sizing.memory import layer_kinds

# Two sequences of 60 tokens.
BATCH = MicroBatch(120, 2, 60)


def attention_of(
    resolved: Any, model: str, dtype: str, cuts: tuple[int, int, int] = (1, 1, 1), has_kernel: bool = False, **arch: int
) -> tuple[Attention, Layer]:
    """Return attention of a model, and its last layer; keys are chosen for 16 queries at a time."""
    config = resolved(model).config
    trainer = dataclasses.replace(config.trainer, params_dtype=dtype, attention_chunk_tokens=16)
    architecture = dataclasses.replace(config.model.architecture, **arch)
    row = Row(architecture, trainer, cuts, BATCH, 1.0)
    assert chooses_keys(architecture, 0) == (architecture.index_n_heads > 0)
    return Attention(architecture, row, BATCH.longest, has_kernel), layer_kinds(architecture)[0][-1]


def test_kernels_that_choose_keys_hold_their_scores(resolved) -> None:
    """Four bytes a pair, of four chunks of 16 queries; torch holds two numbers a head, and 5 bytes."""
    in_torch, layer = attention_of(resolved, "tiny", "bf16", index_topk=32)
    arch, row = in_torch._arch, in_torch._row
    fused = Attention(arch, row, BATCH.longest, False, is_indexer_fused=True)
    saved = 8 * arch.index_n_heads + 5 - 4 * 4
    assert in_torch.choosing(layer, False) - fused.choosing(layer, False) == saved * row.scored_pairs() > 0


def test_grouped_queries(resolved) -> None:
    """Qwen3-4B over TP4: 8 of 32 heads of 128, 2 of 8 of keys and of values; queries and keys have norms."""
    attention, layer = attention_of(resolved, "qwen3_4b", "bf16", (4, 1, 1))
    query, key, thin, wide = 1024, 256, 2 * 30 * 2560, 2 * 120 * 2560
    kept = 2 * 120 * (2 * query + 2 * key + key + query) + 4 * 120 * 8
    assert attention.kept(layer) == kept
    assert attention.gradients(layer) == 0
    assert attention.choosing(layer, True) == attention.choosing(layer, False) == 0
    own = 2 * 120 * ((query + 2 * key) + (query + key) + (query + key) + query)
    assert attention.forward(layer) == max(own + 2 * 120 * key + 4 * 8 * 120, own + wide + thin) + thin


def test_ranks_that_share_a_row(resolved) -> None:
    """CP2: 60 tokens of this rank, 120 keys of both."""
    attention, layer = attention_of(resolved, "qwen3_4b", "bf16", (4, 2, 1))
    query, key, thin = 1024, 256, 2 * 15 * 2560
    assert attention.gradients(layer) == 2 * (120 * (4 * 2 * key + key) + 3 * 60 * query)
    own = 2 * 60 * ((query + 2 * key) + 2 * (query + key) + query)
    attended = own + 2 * (60 * key + 3 * 60 * query + 120 * 2 * key) + 4 * 8 * 60
    assert attention.forward(layer) == attended + thin
    latents, layer = attention_of(resolved, "moonlight", "bf16", (4, 2, 1))
    width = 16 // 4 * (128 + 64)
    assert latents.gradients(layer) == 2 * (120 * (4 * 2 * width + width) + 3 * 60 * width)


def test_queries_in_fp32_have_no_fused_attention(resolved) -> None:
    attention, layer = attention_of(resolved, "qwen3_4b", "fp32", (4, 1, 1))
    query, key, thin, pairs = 1024, 256, 4 * 30 * 2560, 120 * 60

    def unfused(numbers: int) -> int:
        return 3 * 4 * 120 * query + (numbers * 4 * 8 + 1) * pairs

    assert attention.kept(layer) == 4 * 120 * (query + key + query) + unfused(2)
    assert attention.gradients(layer) == 4 * 120 * (key - query) + 2 * 4 * 8 * pairs
    own = 4 * 120 * ((query + 2 * key) + 2 * (query + key) + query)
    attends = max(unfused(3), unfused(2) + 4 * (120 + 120) * query)
    assert attention.forward(layer) == own + 4 * 120 * (key - query) + attends + thin


def test_latents_in_fp32(resolved) -> None:
    """Moonlight over TP4: 4 of 16 heads of 128 + 64, values of 128, a latent of 512."""
    attention, layer = attention_of(resolved, "moonlight", "fp32", (4, 1, 1))
    query, value, thin, pairs = 4 * 192, 4 * 128, 4 * 30 * 2048, 120 * 60

    def unfused(numbers: int) -> int:
        return 3 * 4 * 120 * query + (numbers * 4 * 4 + 1) * pairs

    latents = 4 * 30 * 512
    assert attention.kept(layer) == 4 * 120 * value + latents + unfused(2)
    assert attention.gradients(layer) == 2 * 4 * 4 * pairs
    attends = max(unfused(3), unfused(2) + 4 * (120 + 120) * value)
    assert attention.forward(layer) == 4 * 120 * (2 * query + query + value) + latents + attends + thin


def test_latents_with_fused_attention(resolved) -> None:
    attention, layer = attention_of(resolved, "moonlight", "bf16", (4, 1, 1))
    query, value, thin = 4 * 192, 4 * 128, 2 * 30 * 2048
    assert attention.kept(layer) == 2 * 120 * (query + value + query + value) + 2 * 30 * 512 + 4 * 4 * 120
    assert attention.forward(layer) == 2 * 120 * 2 * (query + query + value) + 2 * 30 * 512 + thin


def test_chosen_keys(resolved) -> None:
    """Tiny: 4 heads of 16 + 8, values of 16, latents of 48 and 32, 4 heads of the indexer; 8 keys are chosen."""
    attention, layer = attention_of(resolved, "tiny", "bf16")
    query, value, masked = 96, 64, 2 * (256 + 512 + 768 + 720)
    latents = 2 * 120 * (48 + 32)
    blocks = 2 * 120 * (query + value + query + value) + latents + 4 * 4 * 120 + 2 * masked
    wider = 2 * (120 + 120) * (query + value - 2 * value)
    assert attention.kept(layer) == blocks + latents + wider + 2 * 120 * (value + 4 * 8)
    pairs = 2 * 16 * 60
    assert attention.choosing(layer, True) == attention.choosing(layer, False) == (2 * 4 * 4 + 5) * pairs + blocks
    taking_over = tuple(weight for weight in layer if weight.component != "indexer")
    assert attention.choosing(taking_over, True) == 0, "where the choice of an earlier layer is taken over"
    single, layer = attention_of(resolved, "tiny", "bf16", index_n_heads=1)
    assert single.choosing(layer, True) == 20 * pairs + blocks, "what it takes to choose is more"
    all_seen, layer = attention_of(resolved, "tiny", "bf16", index_topk=60)
    assert all_seen.choosing(layer, True) == 0


def test_chosen_keys_in_the_latents_space(resolved) -> None:
    attention, layer = attention_of(resolved, "tiny", "bf16", has_kernel=True)
    query, value, key = 96, 64, 32 + 8
    latents = 2 * 120 * (48 + 32)
    kept = 2 * 120 * (query + value + 5 * key + 4 * 32) + latents + 4 * 4 * 120 + 4 * 120 * 8
    assert attention.kept(layer) == kept
    assert (attention.forward(layer), attention.gradients(layer)) == (0, 0)
    forward = (2 * 4 * 4 + 5) * 2 * 16 * 60 + 2 * 120 * (5 * key + 4 * 16) + 120 * (4 * 4 + 2 * 8)
    assert attention.choosing(layer, False) == forward
    assert attention.choosing(layer, True) == forward + 2 * 120 * query

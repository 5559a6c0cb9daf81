"""The table of NVIDIA's GPUs: its terms by hand, and peaks that a rehearsal has shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.derived import stage_chunks
from posttrain.config.families import chooses_keys
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.activations import MicroBatch, fullest_micro_batch, most_in_flight
from posttrain.plan.sizing.activations_cuda import WORKSPACE_BYTES, Moment, _moments, fullest_moment, kernel_bytes
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.memory_phases import phase_memory
from posttrain_rehearsal.outcome import UNSEEN
from posttrain_rehearsal.rank_subset import shallow
from posttrain_rehearsal.sampled_shapes import rehearsed_row

CONFIG = Path(__file__).parents[2] / "config"
# What a rank of a stage held at most in the second step of a rehearsal, GiB.
PEAKS = {
    ("qwen3_0.6b", 1): {(0, "old_logprobs"): 2.215, (0, "train"): 3.064},
    ("qwen3_4b", 1): {(0, "old_logprobs"): 2.903, (0, "mismatch"): 2.993, (0, "train"): 4.078},
    ("moonlight", 1): {(0, "old_logprobs"): 3.957, (0, "train"): 4.389},
    ("glm5_4layer", 1): {(0, "old_logprobs"): 30.735, (0, "mismatch"): 33.119, (0, "train"): 32.084},
    ("qwen3_30b_a3b", 2): {(0, "old_logprobs"): 3.116, (0, "train"): 3.461},
    ("glm4.5_air", 4): {
        (0, "old_logprobs"): 6.672,
        (0, "train"): 7.510,
        (1, "old_logprobs"): 8.653,
        (1, "train"): 9.413,
    },
    ("glm5_20layer", 6): {
        (0, "old_logprobs"): 14.484,
        (0, "train"): 14.654,
        (1, "old_logprobs"): 22.128,
        (1, "train"): 22.291,
        (2, "old_logprobs"): 24.119,
        (2, "train"): 25.304,
    },
    # Two ranks share a row.
    ("deepseek_v3", 16): {(0, "train"): 11.268, (1, "train"): 15.703, (3, "train"): 16.456},
}


# The same in FP32, which Transformer Engine attends to without a fused kernel; tiny models keep all.
FP32 = "trainer.params_dtype=fp32"
OTHER_PEAKS = [
    ("qwen3_0.6b", {"set": FP32}, {(0, "old_logprobs"): 7.357, (0, "mismatch"): 7.995, (0, "train"): 10.579}),
    ("moonlight", {"set": FP32}, {(0, "old_logprobs"): 3.020, (0, "mismatch"): 3.935, (0, "train"): 5.743}),
    ("tiny", {"hardware": "h100"}, {(0, "old_logprobs"): 0.172, (0, "train"): 0.246}),
    (
        "tiny",
        {"hardware": "h100", "nodes": 12},
        {(0, "old_logprobs"): 0.044, (0, "train"): 0.097, (1, "old_logprobs"): 0.171, (1, "train"): 0.209},
    ),
    (
        "tiny_qwen3",
        {"hardware": "h100", "set": "trainer.recompute_granularity=full"},
        {(0, "old_logprobs"): 0.046, (0, "train"): 0.057},
    ),
    # Modules that are computed again in the backward pass.
    (
        "glm5_4layer",
        {
            "set": "trainer.recompute_granularity=selective trainer.recompute_modules=[layernorm,mla_up_proj,moe,mlp]",
            "nodes": 1,
        },
        {(0, "old_logprobs"): 4.638, (0, "mismatch"): 7.022, (0, "train"): 32.252},
    ),
    # What is on its way between stages that interleave; experts that are not computed again.
    (
        "qwen3_4b",
        {
            "hardware": "h100",
            "nodes": 2,
            "set": "parallel.tensor_model_parallel_size=2 parallel.pipeline_model_parallel_size=4"
            " parallel.virtual_pipeline_model_parallel_size=3",
        },
        {(0, "old_logprobs"): 2.003, (0, "train"): 9.600, (3, "old_logprobs"): 2.004, (3, "train"): 8.931},
    ),
    (
        "qwen3_30b_a3b",
        {"nodes": 4, "set": "trainer.recompute_granularity=none trainer.max_tokens_per_gpu=8192"},
        {(0, "train"): 54.339, (1, "train"): 48.778, (15, "train"): 22.592},
    ),
]


# What the recipe that others have published for GLM-5 says: each layer is computed again, two ranks share a row.
PUBLISHED = (
    "parallel.context_parallel_size=2 trainer.max_tokens_per_gpu=16384 trainer.recompute_granularity=full"
    " trainer.optimizer_cpu_offload=false parallel.virtual_pipeline_model_parallel_size=1"
)


def config_of(model, nodes=1, **words):
    return resolve({"site": "local", "model": model, "nodes": nodes, **words}, CONFIG).config


@pytest.mark.parametrize(("model", "nodes"), PEAKS, ids=str)
def test_peaks_of_a_rehearsal(model, nodes):
    hold_against(shallow(config_of(model, nodes)), PEAKS[model, nodes], trainer_sleeps=False, tolerance=0.01)


@pytest.mark.parametrize(("model", "words", "peaks"), OTHER_PEAKS)
def test_peaks_of_another_rehearsal(model, words, peaks):
    hold_against(shallow(config_of(model, **words)), peaks, trainer_sleeps=True, tolerance=0.013)


FULL = "trainer.recompute_granularity=full"
# GLM-5 on 16 nodes with few layers of each kind: kernels choose keys, four ranks share a row.
RECIPE_PEAKS = [
    # Modules are computed again.
    (
        {"recipe": "production"},
        {
            (0, "old_logprobs"): 3.355,
            (0, "mismatch"): 4.051,
            (0, "train"): 12.138,
            (1, "mismatch"): 4.011,
            (1, "train"): 12.272,
            (3, "mismatch"): 4.398,
            (3, "train"): 9.726,
        },
    ),
]


@pytest.mark.parametrize(("words", "peaks"), RECIPE_PEAKS)
def test_peaks_of_a_rehearsal_of_glm5s_recipe(words, peaks):
    hold_against(shallow(config_of("glm5", 16, **words)), peaks, trainer_sleeps=True, tolerance=0.02)


def test_layers_that_are_computed_again_together():
    config = config_of("qwen3_0.6b", hardware="h100", set="trainer.recompute_num_layers=4")
    hold_against(config, {(0, "train"): 6.123}, trainer_sleeps=True, tolerance=0.01)
    # A chunk has no more layers than there are.
    few = config_of("qwen3_4b", set="trainer.recompute_num_layers=4")
    hold_against(shallow(few), {(0, "train"): 4.074}, trainer_sleeps=True, tolerance=0.01)


def hold_against(config, peaks, trainer_sleeps, tolerance):
    rows = phase_memory(config, batch=rehearsed_row(config), trainer_sleeps=trainer_sleeps)
    planned = {
        (row.stage, row.phase): sum(size for part, size in row.gpu.items() if part not in UNSEEN) for row in rows
    }
    for place, gib in peaks.items():
        # Of the smallest models a part of what a rank holds is as small as four MiB.
        assert planned[place] == pytest.approx(gib, rel=tolerance, abs=0.004), place


def test_what_transformer_engine_keeps_by_hand():
    """TP4, each matrix once: queries and keys from their latents, output, three MLPs of gate and up, and down."""
    attention = 4096 * 2048 + 7168 * 512 + 6144 * 4096
    dense, shared, expert = 3 * 3072 * 6144, 3 * 512 * 6144, 3 * 2048 * 6144
    config = config_of("glm5_4layer")
    assert kernel_bytes(config, 0) == 5 * WORKSPACE_BYTES + 2 * (attention + dense + shared + expert)
    assert kernel_bytes(config, 0, has_trained=False) == 5 * WORKSPACE_BYTES
    # Without experts no groups; queries, keys and values are one matrix, of TP2.
    joined, output, mlp = (4096 + 2 * 1024) // 2 * 2560, 2560 * 2048, 3 * 9728 // 2 * 2560
    assert kernel_bytes(config_of("qwen3_4b"), 0) == WORKSPACE_BYTES + 2 * (joined + output + mlp)


def test_the_loss_is_the_fullest_moment_of_a_large_vocabulary():
    """17 responses of 100 tokens, of whose log-probabilities 1,024 are computed at a time; 154,880 words over TP4."""
    config = config_of("glm5_4layer")
    batch = rehearsed_row(config)
    assert (batch.tokens, batch.num_sequences) == (17 * 120, 17)
    moment, words = fullest_moment(config, 0, batch, ASSUMPTIONS, True), 154880 // 4
    assert moment.logprobs == 6 * words * 6144 + 6 * words * 1024 + 4 * 1700 * 6144
    # The inputs of four layers and of the last norm, over TP4, and cosines and sines of 64 angles.
    assert moment.activations == 5 * 2 * 510 * 6144 + 2 * 4 * 64 * 120
    assert moment.dispatch == 0


def test_the_embeddings_gradient_is_the_fullest_moment_of_a_few_tokens():
    """GLM-5, TP4 PP4 CP2: 32 tokens of this rank, in parts of 8; four micro-batches keep 20 inputs and what goes on."""
    moment = fullest_moment(config_of("glm5", 16, set=PUBLISHED), 0, MicroBatch(64, 1, 64), ASSUMPTIONS, True)
    kept = 4 * 21 * 2 * 8 * 6144 + 2 * 4 * 64 * 64
    assert moment == Moment(kept + 2 * 154880 // 4 * 6144 + 2 * 32 * 6144)
    behind = fullest_moment(config_of("glm5", 16, set=PUBLISHED), 1, MicroBatch(64, 1, 64), ASSUMPTIONS, True)
    assert behind.total < moment.total / 10


def test_what_is_in_flight_between_chunks_by_hand():
    """GLM-5, TP4 PP4 CP2, 8 tokens of a rank's part; two chunks a stage, and what goes to the next one and back."""
    batch, thin, angles = MicroBatch(64, 1, 64), 2 * 8 * 6144, 2 * 4 * 64 * 64
    plain, chunked = (config_of("glm5", 16, set=f"{PUBLISHED[:-1]}{number}") for number in (1, 2))
    for stage in range(4):
        (layers,) = stage_chunks(plain)[stage]
        in_flight = (4 - stage) * (len(layers) + (stage < 3)) * thin
        assert _moments(plain, batch, ASSUMPTIONS).kept(stage, [layers]) == angles + in_flight
        chunks = stage_chunks(chunked)[stage]
        kept = [(len(layers) + (layers.stop < 78)) * thin for layers in chunks]
        on_their_way = (4 if stage < 3 else 3) * thin
        in_flight = most_in_flight(kept, 4, stage)
        assert _moments(chunked, batch, ASSUMPTIONS).kept(stage, chunks) == 2 * angles + on_their_way + in_flight


def test_keys_being_chosen_are_the_fullest_moment_of_a_long_rows_forward_pass():
    """GLM-5, TP4 CP2, in the latents' space: 20,480 queries of this rank, 16 heads of 512 + 64, 32 of the indexer."""
    config = config_of("glm5", 16, set=f"{PUBLISHED} trainer.attention_chunk_tokens=2048 trainer.indexer_kernel=torch")
    batch = MicroBatch(40960, 1, 40960)
    scored = config.trainer.attention_chunk_tokens * 40960 // 4
    dealt = 5120 * (32 * (2 * 128 + 4) + 4 * 2048)
    choosing = (2 * 4 * 32 + 5) * scored + 2 * 20480 * 17 * 576 + dealt
    moment = fullest_moment(config, 1, batch, ASSUMPTIONS, is_backward=False)
    assert moment == Moment(2 * 4 * 64 * 40960 + choosing + 3 * 2 * 5120 * 6144)


def test_layers_keep_the_choice_that_later_ones_take_over():
    """GLM-5.2 chooses keys in some layers alone: 2,048 for each of a tensor-parallel rank's tokens, in 16 bits."""
    config, batch = config_of("glm5.2", 16, set=FULL), MicroBatch(4096, 1, 4096)
    arch, parallel, (layers,) = config.model.architecture, config.parallel, stage_chunks(config)[0]
    stages, context = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    tokens = 4096 // context // parallel.tensor_model_parallel_size
    choosing = sum(chooses_keys(arch, layer) for layer in layers)
    assert 0 < choosing < len(layers)
    in_flight = stages * ((len(layers) + 1) * 2 * tokens * 6144 + choosing * 2 * tokens * 2048)
    assert _moments(config, batch, ASSUMPTIONS).kept(0, [layers]) == 2 * 4 * 64 * 4096 + in_flight


@pytest.mark.parametrize(("method", "kept_layers"), [("uniform", 20), ("block", 3)])
def test_recomputed_layers_keep_their_choice(method, kept_layers):
    """GLM-5, TP4 PP4 CP2: 2,048 places for each of 512 tokens, of four micro-batches in flight, in 16 bits."""
    keys = f"{PUBLISHED} trainer.recompute_method={method} trainer.recompute_num_layers={3 if method == 'block' else 1}"
    again, kept = (config_of("glm5", 16, set=f"{keys} trainer.keep_index_choice={value}") for value in ("none", "all"))
    batch, (layers,) = MicroBatch(4096, 1, 4096), stage_chunks(again)[0]
    held = [_moments(each, batch, ASSUMPTIONS).kept(0, [layers]) for each in (again, kept)]
    assert held[1] - held[0] == 4 * kept_layers * 2 * 512 * 2048


def test_a_dense_layer_is_fullest_at_its_activations_gradient():
    """Qwen3-4B in full, TP2 and 20,480 tokens: 16 of 32 heads of 128, 4 of 8 of keys, half of 9,728."""
    config = config_of("qwen3_4b")
    tokens, thin, query, key = 20480, 2 * 10240 * 2560, 16 * 128, 4 * 128
    moment = fullest_moment(config, 0, rehearsed_row(config), ASSUMPTIONS, True)
    attention = 2 * tokens * (3 * query + 3 * key) + 4 * 16 * tokens
    tied = 2 * 151936 // 2 * 2560
    kept = 36 * thin + 2 * 4 * 128 * tokens
    assert moment.activations == kept + attention + 10 * tokens * 9728 // 2 + 5 * thin + tied
    assert moment.logprobs == 0


def test_the_busiest_ranks_rows_are_the_fullest_moment_of_experts():
    """GLM-4.5-Air, EP16: 5,120 tokens of each rank send 8 rows, 1.5 times the mean to the busiest."""
    config = config_of("glm4.5_air", 4)
    moment = fullest_moment(config, 1, rehearsed_row(config), ASSUMPTIONS, True)
    rows, reached = 5120 * 8 * 1.5, 16 * 5120 * (1 - (1 - 1.5 / 16) ** 8)
    assert moment.dispatch == pytest.approx(2 * (2 * reached * 4096 + rows * (2 * 4096 + 3 * 1408)))
    forward = fullest_moment(config, 0, rehearsed_row(config), ASSUMPTIONS, False)
    assert moment.dispatch - forward.dispatch == pytest.approx(2 * reached * 4096)
    assert moment.dispatch / GIB == pytest.approx(2.1, abs=0.01)


def test_attention_is_the_fullest_moment_of_a_forward_pass_of_narrow_layers():
    """Qwen3-0.6B: 16 heads of 128, 8 of keys, where an MLP of 3,072 needs less."""
    config = config_of("qwen3_0.6b", 8, hardware="b200")
    tokens, query, key = rehearsed_row(config).tokens, 16 * 128, 8 * 128
    moment = fullest_moment(config, 1, rehearsed_row(config), ASSUMPTIONS, False)
    angles, thin = 2 * 4 * 128 * rehearsed_row(config).longest, 2 * tokens * 1024
    joined, normed, turned, values_and_output = query + 2 * key, query + key, query + key, key + query
    attention = 2 * tokens * (joined + normed + turned + values_and_output) + 4 * 16 * tokens
    assert moment.activations == angles + 4 * thin + attention


def test_what_is_not_recomputed_is_kept():
    config = config_of("qwen3_4b")
    kept = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, recompute_granularity="none"))
    one, all_of_it = (fullest_moment(each, 0, rehearsed_row(each), ASSUMPTIONS, True) for each in (config, kept))
    assert all_of_it.activations > 10 * one.activations


@pytest.mark.parametrize(
    ("words", "rehearsed_gib"),
    [
        # A dense layer with short rows: attention that makes keys from latents needs most.
        ({"model": "glm5_4layer", "hardware": "gb300", "nodes": 2}, 0.120),
        # One rank holds all experts: rows are permuted once.
        ({"model": "qwen3_30b_a3b", "hardware": "h200", "nodes": 4}, 2.441),
        # The last matrix of attention is cut: all rows of what is to be added up.
        ({"model": "qwen3_0.6b", "hardware": "h100", "nodes": 11}, 0.1516),
        # Shared experts leave nothing but what comes out.
        ({"model": "moonlight", "hardware": "h200", "nodes": 6}, 0.766),
        # Without DeepEP a rank's own rows are gone when others' have come.
        ({"model": "moonlight", "hardware": "gb300", "nodes": 6}, 0.791),
    ],
)
def test_a_forward_pass_is_what_it_was_in_a_rehearsal(words: dict[str, object], rehearsed_gib: float) -> None:
    config = resolve({"site": "local", **words}, CONFIG).config
    moment = fullest_moment(config, 0, fullest_micro_batch(config, ASSUMPTIONS), ASSUMPTIONS, is_backward=False)
    assert moment.total / GIB == pytest.approx(rehearsed_gib, rel=0.03)

"""A step's training by cause, against sums made by hand."""

import dataclasses
from pathlib import Path

import pytest
from benchmarks.published import MODELS, machine_of

from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing import attainable
from posttrain.plan.timing.step_time import trainer_of
from posttrain.plan.timing.update_time import Trainer, forward_causes, layer_elements, mfu, train_causes


@pytest.fixture(scope="module")
def h200():
    return machine_of("H200", resolve({"model": "glm5", "site": "local"}, Path("config")).config.hardware)


def glm5(h200, **sizes):
    return Trainer(MODELS["GLM-5"], h200, **{"num_gpus": 128, "stages": (20, 20, 20, 18), "expert": 32} | sizes)


def test_matrices_and_attention_of_a_dense_model_by_hand(h200, resolved):
    arch = resolved("qwen3_4b").config.model.architecture
    causes = forward_causes(Trainer(arch, h200, 1, kernel="flash_3"), 1, 16384)
    flops = sequence_flops(arch, 16384)
    assert causes["matrices"] == pytest.approx(flops.linear / (989.5e12 * 794.5 / 989))
    assert causes["attention"] == pytest.approx(flops.attention / 616e12)
    backward = train_causes(Trainer(arch, h200, 1, kernel="flash_3", recompute=False), 1, 16384)
    assert backward["matrices"] == pytest.approx(3 * causes["matrices"])
    assert backward["attention"] == pytest.approx(causes["attention"] * (1 + 2.5 * 616 / 561))


def test_recomputation_is_the_forward_pass_of_the_layers_again(h200):
    full, none = (train_causes(glm5(h200, recompute=value), 64, 16384) for value in (True, False))
    forward = forward_causes(glm5(h200), 64, 16384)
    not_repeated = ("pipeline messages", "pipeline idle", "output matrix")
    layers = sum(value for cause, value in forward.items() if cause not in not_repeated)
    assert "recomputation" not in none
    assert full["recomputation"] == pytest.approx(layers)


def test_adapters_need_no_gradients_of_weights(h200):
    all_weights, adapters = (train_causes(glm5(h200, trains_all=value), 64, 16384) for value in (True, False))
    assert adapters["matrices"] < 0.8 * all_weights["matrices"]
    assert adapters["attention"] == all_weights["attention"]
    assert "data-parallel exchange" not in adapters


def test_the_bubble_is_a_stages_time_for_each_that_it_waits_for(h200):
    trainer = glm5(h200, num_micro_batches=8)
    causes = train_causes(trainer, 256, 16384)
    busy = sum(causes.values()) - causes["pipeline idle"] - causes.get("data-parallel exchange", 0.0)
    assert causes["pipeline idle"] == pytest.approx(busy * 3 / 8)
    chunks = train_causes(dataclasses.replace(trainer, num_chunks=2), 256, 16384)
    assert chunks["pipeline idle"] == pytest.approx(causes["pipeline idle"] / 2, rel=0.01)


def test_our_attention_multiplies_all_keys_and_scores_them_in_fp32(h200):
    ours, chosen = (
        forward_causes(glm5(h200, kernel=kernel, is_indexer_fused=fused), 64, 32768)
        for kernel, fused in ((None, False), ("sparse", True))
    )
    assert ours["indexer"] > 5 * chosen["indexer"]
    assert ours["attention"] > 2 * chosen["attention"]


def test_tensor_parallel_ranks_share_the_choice_of_keys_by_hand(h200):
    """A row of 2**15 tokens: scores over TP4, then latents and head weights dealt, keys and places gathered."""
    alone, shared = (
        forward_causes(glm5(h200, num_gpus=16 * size, tensor=size, expert=8), 4, 2**15)["indexer"] for size in (1, 4)
    )
    sent = 2**15 * ((2 * 2048 + 4 * 32) / 4 + 2 * 128 + 2 * 2048) * 3 / 4
    assert shared == pytest.approx(alone / 4 + 20 * sent / attainable.link(h200, 4), rel=1e-6)
    assert shared < 1.05 * alone / 4


def test_a_kernel_multiplies_chosen_keys_that_are_missing_too(h200):
    """2 x 64 heads x (2 x 512 + 64) x 2,048 keys for each of 2,048 tokens a rank at 600 TFLOPS."""
    row = glm5(h200, kernel="sparse", num_micro_batches=1)
    seconds = 2 * 64 * 1088 * 2048 * 2048 / 600e12
    assert forward_causes(row, 32, 2048)["attention"] == pytest.approx(20 * seconds)


def test_training_counts_the_kernel_that_the_plan_has_chosen(resolved):
    config = resolved("glm5").config
    masked = resolved("glm5", set="trainer.sparse_attention=masked").config
    assert (trainer_of(config).kernel, trainer_of(masked).kernel) == ("tilelang", None)
    in_torch = resolved("glm5", set="trainer.indexer_kernel=torch").config
    assert (trainer_of(config).is_indexer_fused, trainer_of(in_torch).is_indexer_fused) == (True, False)
    short = resolved("glm5", set="rollout.max_response_tokens=2048 rollout.max_prompt_tokens=512").config
    assert trainer_of(short).kernel is None, "no longer than the keys that it may choose"
    assert trainer_of(resolved("qwen3_4b").config).kernel is None


@pytest.mark.parametrize("is_fused", [True, False])
def test_recomputation_reads_a_kept_choice(h200, is_fused):
    """By hand, TP4: of scores, dealt queries and gathered keys nothing is done again; places are gathered again."""
    row = glm5(h200, num_micro_batches=1, tensor=4, is_indexer_fused=is_fused)
    again, kept = (train_causes(dataclasses.replace(row, chooses_again=value), 32, 16384) for value in (True, False))
    forward = forward_causes(row, 32, 16384)
    places = 32 * 16384 / row.data * 2048 * 2 * 3 / 4 / attainable.link(h200, 4)
    saved = again["recomputation"] - kept["recomputation"]
    projections = 2 * 32 * 16384 / row.data / 4 * (32 * 128 * 2048 + 6144 * (128 + 32)) / attainable.gemm(h200)
    assert saved == pytest.approx(forward["indexer"] - 20 * places + 20 * projections, rel=1e-3)
    assert {name: value for name, value in again.items() if name not in ("recomputation", "pipeline idle")} == {
        name: value for name, value in kept.items() if name not in ("recomputation", "pipeline idle")
    }
    selective = dataclasses.replace(row, recompute=0.0, recompute_modules=("moe",))
    assert train_causes(selective, 32, 16384) == train_causes(
        dataclasses.replace(selective, chooses_again=False), 32, 16384
    )


def test_training_counts_choices_that_later_layers_take_over_as_kept(resolved):
    plain, kept = (resolved("glm5", set=f"trainer.keep_index_choice={value}").config for value in ("none", "all"))
    assert [trainer_of(each).chooses_again for each in (plain, kept)] == [True, False]
    assert not trainer_of(resolved("glm5.2").config).chooses_again


def test_tokens_go_to_each_node_once(h200):
    """EP32 on nodes of eight: 8 copies end on 4 (1 - 0.75^8) = 3.6 nodes, at 58 of 50 GB/s."""
    seconds = attainable.dispatch_seconds(h200, 32, 8, 2 * 6144)
    assert seconds == pytest.approx(4 * (1 - 0.75**8) * 12288 / 58e9)
    causes = forward_causes(glm5(h200, num_micro_batches=1), 32, 2048)
    assert causes["EP dispatch"] == pytest.approx(2 * 2048 * seconds * 20)


def test_an_uneven_router_costs_experts_and_their_dispatch(h200):
    even, uneven = (forward_causes(glm5(h200, imbalance=value), 64, 16384) for value in (1.0, 1.5))
    assert "imbalance of experts" not in even
    assert uneven["imbalance of experts"] == pytest.approx((uneven["experts"] + uneven["EP dispatch"]) / 2)


def test_gradients_are_exposed_where_nothing_runs_beside_them(h200):
    hidden, shown = (train_causes(glm5(h200, overlaps=value), 64, 16384) for value in (True, False))
    assert "data-parallel exchange" not in hidden
    dense, _, _ = layer_elements(MODELS["GLM-5"])
    # 32 ranks of a stage, which share the experts: only what is outside of them is exchanged, 4 + 2 bytes, 44 GB/s.
    assert shown["data-parallel exchange"] == pytest.approx(6 * 20 * dense * 31 / 32 / 44e9)


def test_small_micro_batches_wait_for_their_launches(h200):
    small, large = (forward_causes(glm5(h200), 32, tokens) for tokens in (4, 16384))
    # 20 layers, each as long as its kernels take to launch.
    layers = sum(value for cause, value in small.items() if not cause.startswith(("pipeline", "output")))
    assert layers == pytest.approx(20 * 1254 / 8 * attainable.LAUNCH_SECONDS)
    assert "launches" not in large


def test_mfu_counts_nothing_twice(h200):
    trainer = glm5(h200)
    work = 64 * sequence_flops(MODELS["GLM-5"], 16384).training(recompute=False)
    assert mfu(trainer, 64, 16384, 10.0) == pytest.approx(work / (10 * 128 * 989.5e12))


def test_rates_lie_between_those_measured_and_scale_with_the_peak(h200):
    b200 = machine_of("B200", h200)
    assert attainable.experts(h200, 768) == pytest.approx(242.12e12)
    assert attainable.experts(h200, 512) < attainable.experts(h200, 600) < attainable.experts(h200, 768)
    assert attainable.experts(h200, 100_000) == attainable.experts(h200, 5120) == pytest.approx(524.5e12, rel=1e-3)
    assert attainable.gemm(b200) / attainable.gemm(h200) == pytest.approx(2250 / 989.5)
    assert attainable.attention(h200, "fused", 2048) == (484e12, 465e12)
    assert attainable.attention(h200, "flash_3", 65536) == (616e12, 561e12)

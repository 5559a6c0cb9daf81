"""Terms of an update's cost by hand, each with the others left out: 16 nodes of GLM-5, TP4 PP4 CP2 EP32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.config.schema import Config
from posttrain.plan.sizing.activations import MicroBatch
from posttrain.plan.sizing.layout_cost import Cost, Rates, _seconds_of_exchange, layout_cost
from posttrain.plan.sizing.memory import stage_memory

FREE = Rates(flops=1e60, node_link=1e60, network=1e60, launch_seconds=0.0, latency_seconds=0.0)
# 64 samples over 4 data-parallel ranks, each in a row of its own; 20 layers in the largest of 4 stages.
LONG = MicroBatch(40960, 1, 40960)
TURNS, LAYERS = 16 + 3, 20


def cost_of(config: Config, batch: MicroBatch = LONG, **rates: float) -> Cost:
    return layout_cost(config, stage_memory(config), batch, dataclasses.replace(FREE, **rates))


def with_sizes(config: Config, **sizes: int) -> Config:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **sizes))


@pytest.fixture
def glm5(resolved: Any) -> Config:
    return resolved("glm5", set=PUBLISHED_LAYOUT).config


def test_computing(glm5: Config) -> None:
    """Forward, again, and twice backward: 8 operations of each token with each of the active parameters."""
    cost = cost_of(glm5, flops=1e15)
    per_layer = 40_833_126_912 / 78
    assert cost.seconds == pytest.approx(TURNS * LAYERS * 8 * per_layer * 40960 / 8 / 1e15)
    assert cost.communication_fraction == pytest.approx(0.0)
    slow = cost_of(glm5, flops=1e15, launch_seconds=100.0)
    assert slow.seconds == pytest.approx(TURNS * LAYERS * 100.0), "no layer takes less than its kernels' launch"


def test_samples_that_share_a_row(glm5: Config) -> None:
    cost = cost_of(glm5, MicroBatch(40960, 4, 10000), flops=1e15)
    assert cost.num_micro_batches == 4
    assert cost.seconds == pytest.approx((4 + 3) * LAYERS * 8 * 40_833_126_912 / 78 * 40000 / 8 / 1e15)
    # No more than a rank has; a last row may be shorter.
    assert cost_of(glm5, MicroBatch(40960, 40, 1000), flops=1e15).num_micro_batches == 1
    assert cost_of(glm5, MicroBatch(40960, 6, 6800), flops=1e15).num_micro_batches == 3
    assert cost_of(glm5, MicroBatch(1000, 1, 2000), flops=1e15).num_micro_batches == 16


def test_what_waits_for_each_collective(glm5: Config) -> None:
    """In each of three passes TP, CP and EP; to the next stage and back; gradients and weights."""
    assert cost_of(glm5, latency_seconds=1.0).seconds == pytest.approx(TURNS * LAYERS * 3 * 3 + TURNS * 2 + 2)
    experts = with_sizes(glm5, expert_model_parallel_size=16, expert_tensor_parallel_size=2)
    assert cost_of(experts, latency_seconds=1.0).seconds == pytest.approx(TURNS * LAYERS * 3 * 4 + TURNS * 2 + 2)
    alone = with_sizes(
        glm5, tensor_model_parallel_size=1, context_parallel_size=1, expert_model_parallel_size=1,
        pipeline_model_parallel_size=1, num_layers_in_last_pipeline_stage=0,
    )  # fmt: skip
    alone = dataclasses.replace(alone, training=dataclasses.replace(alone.training, global_batch_size=128))
    assert cost_of(alone, latency_seconds=1.0).seconds == pytest.approx(2)


def test_two_replicas_exchange_gradients_and_weights(glm5: Config) -> None:
    """128 ranks in 8 stages of TP8 are two replicas: gradients in FP32 and weights in BF16, half of each sent."""
    two = with_sizes(
        glm5, tensor_model_parallel_size=8, pipeline_model_parallel_size=8, context_parallel_size=1,
        expert_model_parallel_size=16, num_layers_in_last_pipeline_stage=8,
    )  # fmt: skip
    dense = max(stage.dense_elements for stage in stage_memory(two))
    assert _seconds_of_exchange(two, stage_memory(two), dataclasses.replace(FREE, network=1.0)) >= 6 * dense / 2


def test_interleaved_stages_wait_less_and_send_more(glm5: Config) -> None:
    """With two chunks to a stage the pipeline fills in half the turns, and each turn sends twice as much."""
    chunks = with_sizes(glm5, virtual_pipeline_model_parallel_size=2)
    turns = 16 + 3 / 2
    assert cost_of(chunks, latency_seconds=1.0).seconds == pytest.approx(turns * LAYERS * 3 * 3 + turns * 4 + 2)


def test_which_links_a_group_uses(glm5: Config) -> None:
    """8 GPUs to a node: TP4 with CP2 fits into one, EP32 does not, nor do stages or replicas."""
    row = 2 * 6144
    tensor, context = 4 * 20480 * row * 3 / 4, 40960 * 2 * (512 + 64) / 2
    assert cost_of(glm5, node_link=1.0).seconds == pytest.approx(TURNS * LAYERS * 3 * (tensor + context))
    expert, to_next_stage = 2 * 5120 * 8 * row * 31 / 32, 2 * 5120 * row
    exchange = 6 * 7 / 8 * max(stage.dense_elements for stage in stage_memory(glm5))
    over_network = TURNS * (LAYERS * 3 * expert + to_next_stage) + exchange
    assert cost_of(glm5, network=1.0).seconds == pytest.approx(over_network)
    # Each node holds all experts, in halves: tokens go to 4 ranks, and are gathered by 2 that share an expert.
    near = with_sizes(glm5, expert_model_parallel_size=4, expert_tensor_parallel_size=2)
    expert, gathered = 2 * 5120 * 8 * row * 3 / 4, 2 * 2 * 5120 * 8 * row / 2
    inside = TURNS * LAYERS * 3 * (tensor + context + expert + gathered)
    assert cost_of(near, node_link=1.0).seconds == pytest.approx(inside)
    shared = max(stage.dense_elements * 7 / 8 + stage.expert_elements * 3 / 4 for stage in stage_memory(near))
    assert cost_of(near, network=1.0).seconds == pytest.approx(TURNS * to_next_stage + 6 * shared)


def test_a_model_without_latents_gathers_keys_and_values(resolved: Any) -> None:
    config = with_sizes(resolved("qwen3_4b").config, tensor_model_parallel_size=1, context_parallel_size=2)
    batch = MicroBatch(1000, 1, 1000)
    ranks, samples = 8 // 2, config.training.global_batch_size
    sent = samples / ranks * 36 * 3 * 1000 * 2 * 2560 / 2
    assert cost_of(config, batch, node_link=1.0).seconds == pytest.approx(sent)
    assert cost_of(with_sizes(resolved("tiny").config), MicroBatch(100, 1, 100), network=1.0).seconds < 1e-20

import dataclasses

import pytest

from posttrain.config.schema import Parallel
from posttrain.plan.sizing.memory import GIB, _aligned, largest_weights, served_layer_bytes, shards, stage_memory
from posttrain.plan.sizing.model_size import Weight, count_parameters, model_weights

# Of the tiny model: four indexers, which are frozen, and the buffers of three routers of eight experts.
TINY_INDEXERS = 4 * (4 * 16 * 48 + 16 * 64 + 2 * 16 + 4 * 64)
ROUTER_BUFFERS = 3 * 8 * 8


def test_one_rank_holds_everything(resolved):
    (stage,) = stage_memory(resolved("tiny").config)
    assert stage.parameters_per_rank == 292_352
    # A norm of 48, two of 32 beside it: each latent's norm starts at a multiple of 64.
    padding = 4 * ((64 - 48) + (64 - 32))
    trained = 292_352 - TINY_INDEXERS + padding
    trained += -trained % 128
    assert stage.dense_elements + stage.expert_elements == trained
    assert stage.weights_bytes == 4 * (trained + TINY_INDEXERS) + ROUTER_BUFFERS
    assert stage.gradients_bytes == 4 * trained
    assert stage.optimizer_bytes == 8 * trained
    assert stage.total_gib == (stage.weights_bytes + 12 * trained) / GIB


def test_glm5_stage_by_hand(resolved):
    stages = stage_memory(resolved("glm5").config)
    assert [stage.num_layers for stage in stages] == [20, 20, 20, 18]
    # Stage 1: 20 MoE layers; TP4, EP32; optimizer state of the dense part over 128 / (4 x 4) ranks, of
    # experts over 1. The indexers are frozen.
    experts = 20 * 256 * 3 * 6144 * 2048 // 32
    cut = 20 * (64 * 256 * 2048 + 64 * 448 * 512 + 64 * 256 * 6144 + 3 * 6144 * 2048) // 4
    indexers = 20 * (32 * 128 * 2048 + 6144 * 160 + 256)
    whole = 20 * (6144 * (2048 + 576) + 2048 + 512 + 2 * 6144 + 256 * 6144)
    trained, stage = experts + cut + whole, stages[1]
    assert stage.parameters_per_rank == trained + indexers
    assert stage.weights_bytes == 2 * (trained + indexers) + 20 * 256 * 8
    assert stage.gradients_bytes == 4 * trained
    assert stage.optimizer_bytes == 12 * (cut + whole) // 8 + 12 * experts
    assert stage.total_gib == pytest.approx(110.59, abs=0.01)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (2, 1, 4), (1, 4, 2), (4, 2, 8)])
def test_all_ranks_together_hold_the_model_and_its_optimizer_state_once(resolved, sizes):
    tensor, pipeline, expert = sizes
    config = resolved("tiny", nodes=16).config
    parallel = dataclasses.replace(
        config.parallel,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
    )
    variant = dataclasses.replace(config, parallel=parallel)
    stages = stage_memory(variant)
    replicas = 16 // pipeline
    weights = model_weights(config.model.architecture)
    total = sum(stage.parameters_per_rank for stage in stages) * replicas
    assert total >= count_parameters(weights)
    # What tensor parallelism does not cut is held, and its state kept, once per tensor-parallel rank.
    trained = [weight for weight in weights if not weight.is_buffer and weight.component != "indexer"]
    replicated = sum(weight.num_elements for weight in trained if weight.split == "none")
    once = sum(weight.num_elements for weight in trained)
    state = sum(stage.optimizer_bytes for stage in stages) * replicas
    assert state == pytest.approx(8 * (once + (tensor - 1) * replicated), rel=0.01)
    assert shards(variant) == (16 // tensor // pipeline, 16 // expert // pipeline)


def test_a_rank_may_hold_a_part_of_one_expert(resolved):
    """Eight experts on sixteen ranks, each cut in two: the parts of 3 layers, gate, up and down of 32 x 64."""
    config = resolved("tiny", nodes=16).config
    parallel = Parallel(expert_model_parallel_size=8, expert_tensor_parallel_size=2)
    (stage,) = stage_memory(dataclasses.replace(config, parallel=parallel))
    assert stage.expert_elements == 3 * (3 * 32 * 64) // 2


def test_a_stage_as_it_stands_in_the_plan(resolved):
    stage = stage_memory(resolved("glm5").config)[1]
    told = stage.as_dict()
    assert told.pop("total_gib") == round(stage.total_gib, 4) == pytest.approx(110.59, abs=0.01)
    assert type(stage)(**told) == stage


def test_a_tied_embedding_is_held_once_unless_stages_part_it(resolved):
    """Qwen3-4B on one rank, and on two stages; in FP32 what engines have differs in all of it."""
    config = resolved("qwen3_4b").config
    trainer = dataclasses.replace(config.trainer, params_dtype="fp32")
    one = dataclasses.replace(config, parallel=Parallel(), trainer=trainer)
    two = dataclasses.replace(one, parallel=Parallel(pipeline_model_parallel_size=2))
    whole, embedding = 4_022_468_096, 151936 * 2560
    assert [stage.parameters_per_rank for stage in stage_memory(one)] == [whole]
    assert sum(stage.parameters_per_rank for stage in stage_memory(two)) == whole + embedding
    edges = embedding + 2560
    assert served_layer_bytes(one, 0)[0] == 4 * ((whole - edges) // 36 + edges)


def test_each_tensor_begins_at_a_multiple_of_64_elements(resolved):
    """Gate, up and down of 10 or 32 x 40 in halves: 200 elements take 256, 640 take 640."""
    config = dataclasses.replace(resolved("tiny").config, nodes=2, parallel=Parallel(tensor_model_parallel_size=2))

    def dense_elements(width):
        arch = dataclasses.replace(config.model.architecture, hidden_size=40, intermediate_size=width)
        (stage,) = stage_memory(dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=arch)))
        return stage.dense_elements

    assert dense_elements(32) - dense_elements(10) == 3 * 640 - 3 * 256
    # Both of two matrices in halves, and two of eight experts whole.
    assert _aligned(Weight("dense_mlp", (10, 40), 2, "tensor"), 2) == 2 * 256
    assert _aligned(Weight("routed_experts", (10, 40), 8, "expert"), 4) == 2 * 448


def test_the_largest_weights_are_those_of_any_chunk(resolved):
    """The first chunk of the first stage has the three dense layers of GLM-5, and no expert."""
    parallel = Parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=13)
    config = dataclasses.replace(resolved("glm5").config, parallel=parallel)
    assert largest_weights(config, 0) == (154880 * 6144, 2048 * 6144)


def test_offloaded_optimizer_state_is_not_on_the_gpu(resolved):
    inside = resolved("glm5").config
    outside = resolved("glm5", set="trainer.optimizer_cpu_offload=true").config
    stage, moved = stage_memory(inside)[1], stage_memory(outside)[1]
    assert moved.total_gib == pytest.approx(stage.total_gib - stage.optimizer_bytes / GIB)
    # Master copy, two moments, and the pinned gradient.
    assert moved.optimizer_bytes == pytest.approx(stage.optimizer_bytes * 16 / 12)

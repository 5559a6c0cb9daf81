import dataclasses

import pytest

from posttrain.planner.memory import GIB, host_memory_gib_per_node, stage_memory
from posttrain.planner.model_size import count_parameters, model_weights


def test_one_rank_holds_everything(resolved):
    config = resolved("tiny").config
    (stage,) = stage_memory(config)
    assert stage.parameters_per_rank == 292_352
    assert (stage.weights_bytes, stage.gradients_bytes, stage.optimizer_bytes) == (
        4 * 292_352,
        4 * 292_352,
        8 * 292_352,
    )
    assert stage.total_gib == 16 * 292_352 / GIB
    assert host_memory_gib_per_node(config) == stage.total_gib


def test_glm5_stage_by_hand(resolved):
    stages = stage_memory(resolved("glm5").config)
    assert [stage.num_layers for stage in stages] == [20, 20, 20, 18]
    # Stage 1: 20 MoE layers; TP4, EP32; optimizer state of the dense part over 128 / (4 x 4) ranks, of
    # experts over 1.
    experts = 20 * 256 * 3 * 6144 * 2048 // 32
    cut = 20 * (64 * 256 * 2048 + 64 * 448 * 512 + 64 * 256 * 6144 + 3 * 6144 * 2048) // 4
    indexer = 32 * 128 * 2048 + 6144 * 160 + 256
    whole = 20 * (6144 * (2048 + 576) + 2048 + 512 + 2 * 6144 + indexer + 256 * 6144)
    stage = stages[1]
    assert stage.parameters_per_rank == experts + cut + whole
    assert stage.weights_bytes == 2 * stage.parameters_per_rank
    assert stage.gradients_bytes == 4 * stage.parameters_per_rank
    assert stage.optimizer_bytes == 12 * (cut + whole) // 8 + 12 * experts
    assert stage.total_gib == pytest.approx(111.55, abs=0.01)


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
    stages = stage_memory(dataclasses.replace(config, parallel=parallel))
    replicas = 16 // pipeline
    total = sum(stage.parameters_per_rank for stage in stages) * replicas
    assert total >= count_parameters(model_weights(config.model.architecture))
    # What tensor parallelism does not cut is held, and its state kept, once per tensor-parallel rank.
    state = sum(stage.optimizer_bytes for stage in stages) * replicas
    once = 8 * count_parameters(model_weights(config.model.architecture))
    replicated = 8 * sum(
        w.num_elements for w in model_weights(config.model.architecture) if w.split == "none" and not w.is_buffer
    )
    assert state == pytest.approx(once + (tensor - 1) * replicated, rel=1e-3)


def test_offloaded_optimizer_state_moves_to_the_host(resolved):
    inside = resolved("glm5").config
    outside = resolved("glm5", set="trainer.optimizer_cpu_offload=true").config
    stage, moved = stage_memory(inside)[1], stage_memory(outside)[1]
    assert moved.total_gib == pytest.approx(stage.total_gib - stage.optimizer_bytes / GIB)
    assert host_memory_gib_per_node(inside) == 0
    assert host_memory_gib_per_node(outside) == pytest.approx(8 * stage.optimizer_bytes / GIB)

"""Where each trainer rank stands in the layout, and which engine shares its GPU.

Megatron numbers ranks with the tensor-parallel rank changing fastest, then context, data, pipeline; experts
count in the same order with their own sizes: expert-tensor, expert, expert-data, pipeline
(`megatron.core.parallel_state.RankGenerator`, order "tp-cp-ep-dp-pp", which is its default). So the ranks of
a stage are neighbours, and a tensor-parallel group lies on one node wherever its size divides a node's GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.config.derived import data_parallel_size, world_size
from posttrain.config.schema import Config


@dataclass(frozen=True)
class RankPlace:
    """One trainer rank.

    Args:
        rank: From 0, in the order of nodes and of GPUs on them.
        tensor: Its place in its tensor-parallel group.
        context: In its context-parallel group.
        data: In its data-parallel group.
        stage: Its pipeline stage.
        expert: In its expert-parallel group.
    """

    rank: int
    tensor: int
    context: int
    data: int
    stage: int
    expert: int


def rank_place(config: Config, rank: int) -> RankPlace:
    """Return where a rank stands.

    Example:
        GLM-5 on 16 nodes, TP4 PP4 CP2 EP32 ETP1: rank 37 is tensor 1, context 1, data 0, stage 1, expert 5.
    """
    parallel = config.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    expert_tensor, expert = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    data = data_parallel_size(config)
    return RankPlace(
        rank=rank,
        tensor=rank % tensor,
        context=rank // tensor % context,
        data=rank // (tensor * context) % data,
        stage=rank // (tensor * context * data),
        expert=rank // expert_tensor % expert,
    )


def rank_places(config: Config) -> list[RankPlace]:
    """Return every rank's place, in the order of ranks."""
    return [rank_place(config, rank) for rank in range(world_size(config))]


def engines_by_gpu(config: Config) -> dict[int, str]:
    """Return which engine each GPU belongs to while engines are awake; a GPU without one is left out.

    Engines take consecutive GPUs, those that only prefill first.

    Example:
        One prefill and one decode engine of 64 GPUs: 0 to 63 are "prefill 0", 64 to 127 "decode 0".
    """
    return dict(enumerate(_engine_of_each_gpu(config)))


def _engine_of_each_gpu(config: Config) -> Iterator[str]:
    engine = config.engine
    prefills = engine.pd.num_prefill_engines
    for index in range(prefills):
        yield from [f"prefill {index}"] * engine.pd.gpus_per_prefill_engine
    for index in range(engine.num_engines):
        yield from [f"{'decode' if prefills else 'engine'} {index}"] * engine.gpus_per_engine

"""Which ranks are rehearsed: whole pipelines, so many that every kind of process group has two members.

A quick rehearsal leaves out stages that are like a middle one, and layers that are like another.
"""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.derived import world_size
from posttrain.config.families import chooses_keys
from posttrain.config.load import Resolved
from posttrain.config.schema import Config

# So many layers are rehearsed in little time.
WHOLE_LAYERS = 6


def is_quick(resolved: Resolved) -> bool:
    """Return whether quick=1 asks for few stages."""
    return bool(resolved.request.get("quick"))


def rehearsed_config(resolved: Resolved) -> Config:
    """Return the configuration with the layers that are rehearsed: all, or few where it is to be quick."""
    return shallow(resolved.config) if is_quick(resolved) else resolved.config


def stages_of(config: Config, quick: bool = False) -> list[int]:
    """Return the stages that are rehearsed: all, or the first, the one behind it, and the last."""
    count = config.parallel.pipeline_model_parallel_size
    return sorted({0, 1, count - 1} & {*range(count)}) if quick else [*range(count)]


def members(config: Config, quick: bool = False) -> list[int]:
    """Return the ranks, in order.

    Ranks of a stage are numbered tensor, context, data; experts' ranks tensor, expert, data (Megatron Core's order
    "tp-cp-ep-dp-pp"). So the first rank's neighbour in each kind of group lies one stride of that kind away.

    Example:
        GLM-5 on 16 nodes (TP4 CP2 DP4 PP4, EP32): of each stage of 32 the ranks 0, 1, 4 and 8.
    """
    of_stage, stages = stage_size(config), stages_of(config, quick)
    columns = [place for place in _strides(config) if place < of_stage]
    return sorted(stage * of_stage + place for stage in stages for place in {0, *columns})


def stage_size(config: Config) -> int:
    """Return the ranks of a pipeline stage."""
    return world_size(config) // config.parallel.pipeline_model_parallel_size


def _strides(config: Config) -> list[int]:
    parallel = config.parallel
    strides = []
    for sizes in (
        (parallel.tensor_model_parallel_size, parallel.context_parallel_size),
        (parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size)
        if config.model.architecture.n_routed_experts
        else (),
    ):
        stride = 1
        for size in (*sizes, stage_size(config)):  # data parallelism takes the rest
            if size > 1:
                strides.append(stride)
            stride *= size
    return strides


def shallow(config: Config) -> Config:
    """Return the configuration with few layers, some of each kind: a dense one where there are any, then others.

    Stages keep their chunks, and a chunk as many layers as share one choice of keys, which its first makes. A model of
    few layers stays whole.
    """
    arch, parallel = config.model.architecture, config.parallel
    num_chunks = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    in_last = max(2 if num_chunks > 1 or arch.first_k_dense_replace else 1, arch.index_topk_freq)
    sizes = range(in_last, in_last + arch.index_topk_freq)
    boundaries = range(1, num_chunks)
    per_chunk = next((n for n in sizes if all(chooses_keys(arch, n * i) for i in boundaries)), in_last)
    num_layers = (num_chunks - 1) * per_chunk + in_last
    if arch.num_hidden_layers <= max(num_layers, WHOLE_LAYERS):
        return config
    smaller = replace(
        arch, num_hidden_layers=num_layers, first_k_dense_replace=min(arch.first_k_dense_replace, in_last - 1)
    )
    return replace(
        config,
        model=replace(config.model, architecture=smaller),
        parallel=replace(parallel, num_layers_in_last_pipeline_stage=in_last if per_chunk > in_last else 0),
    )

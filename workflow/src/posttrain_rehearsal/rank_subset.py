"""Chooses the rehearsed ranks: whole pipelines, with two members of every kind of process group.

A quick rehearsal skips duplicates of a middle stage and of a layer.
"""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.derived import world_size
from posttrain.config.families import chooses_keys
from posttrain.config.load import Resolved
from posttrain.config.schema import Config

# Up to this many layers are rehearsed without a reduction, because they take little time.
WHOLE_LAYERS = 6


def is_quick(resolved: Resolved) -> bool:
    """Return whether quick=1 is set."""
    return bool(resolved.request.get("quick"))


def rehearsed_config(resolved: Resolved) -> Config:
    """Return the configuration with the rehearsed layers: all, or few for a quick rehearsal."""
    return shallow(resolved.config) if is_quick(resolved) else resolved.config


def stages_of(config: Config, quick: bool = False) -> list[int]:
    """Return the rehearsed stages: all, or for a quick rehearsal the first, the second and the last."""
    count = config.parallel.pipeline_model_parallel_size
    return sorted({0, 1, count - 1} & {*range(count)}) if quick else [*range(count)]


def members(config: Config, quick: bool = False) -> list[int]:
    """Return the rehearsed ranks, in order.

    Ranks of a stage are numbered tensor, context, data; experts' ranks tensor, expert, data (Megatron Core's order
    "tp-cp-ep-dp-pp"). So the first rank's neighbour in each kind of group is one stride of that kind away.

    Example:
        GLM-5 on 16 nodes (TP4 CP2 DP4 PP4, EP32): ranks 0, 1, 4 and 8 of each stage of 32 ranks.
    """
    of_stage, stages = stage_size(config), stages_of(config, quick)
    columns = [place for place in _strides(config) if place < of_stage]
    return sorted(stage * of_stage + place for stage in stages for place in {0, *columns})


def stage_size(config: Config) -> int:
    """Return the number of ranks in a pipeline stage."""
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
        for size in (*sizes, stage_size(config)):  # data parallelism has the largest stride
            if size > 1:
                strides.append(stride)
            stride *= size
    return strides


def shallow(config: Config) -> Config:
    """Return the configuration with few layers of each kind: a dense one if there are any, then others.

    Stages keep their chunks. A chunk has as many layers as share one choice of keys, which its first layer makes, and
    gated delta nets up to the layer that attends. A model of few layers is unchanged.
    """
    arch, parallel = config.model.architecture, config.parallel
    num_chunks = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    in_last = max(
        2 if num_chunks > 1 or arch.first_k_dense_replace else 1, arch.index_topk_freq, arch.full_attention_interval
    )
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
        parallel=replace(
            parallel,
            num_layers_in_first_pipeline_stage=0,
            num_layers_in_last_pipeline_stage=in_last if per_chunk > in_last else 0,
        ),
    )

"""What an evaluation takes: engines on one node, which serve the model in the precision that fits there."""

from __future__ import annotations

import dataclasses

from posttrain.config.engine import PrefillDecode
from posttrain.config.schema import Config
from posttrain.planner.sizing.engine import engine_memory

# Beyond this nobody would serve a model for an evaluation.
MOST_NODES = 64


def serving_on_one_node(config: Config) -> Config:
    """Return the configuration of engines that serve on one node alone, as evaluations do.

    On GPUs these are as many as the node has room for, of training's size or, where that holds the weights in another
    precision alone, of the next size that holds them; an engine that spans nodes in training gets all of this one's
    GPUs. Attention is cut where a whole node has no room for a copy of it on each GPU.
    """
    is_fp8 = evaluates_fp8(config)
    if config.hardware.device == "cpu":
        return _serving(config, is_fp8)
    per_node = config.hardware.gpus_per_node
    size = min(config.engine.gpus_per_engine, per_node)
    while size * 2 <= per_node and not _has_room(_serving(config, is_fp8, size)):
        size *= 2
    served = _serving(config, is_fp8, size)
    served = served if _has_room(served) else _serving(config, is_fp8, size, dp_attention=False)
    engine = dataclasses.replace(served.engine, num_engines=per_node // size)
    return dataclasses.replace(served, nodes=1, engine=engine)


def evaluates_fp8(config: Config) -> bool:
    """Tell whether evaluations before and after training serve the weights in FP8 (`evaluation.precision`).

    Example:
        GLM-5 on nodes of 8 H200: yes; in BF16 it would take 3 of them.
    """
    if config.evaluation.precision != "auto":
        return config.evaluation.precision == "fp8"
    if config.hardware.device == "cpu" or not config.rollout.fp8:
        return False
    per_node = config.hardware.gpus_per_node
    source, fp8 = (
        any(_has_room(_serving(config, is_fp8, per_node, dp)) for dp in {config.engine.dp_attention, False})
        for is_fp8 in (False, True)
    )
    return fp8 and not source


def quantises_for_engines(config: Config) -> bool:
    """Tell whether the model as it came is quantised to FP8: for rollouts, for the evaluation before them, or both."""
    return config.rollout.fp8 or evaluates_fp8(config)


def evaluation_nodes(config: Config) -> int:
    """Return the smallest number of nodes whose GPUs hold the weights as one engine; one is all that is served on.

    Example:
        GLM-5 on nodes of 8 H200: 1, in FP8; 3 with `evaluation.precision=source`.
    """
    if config.hardware.device == "cpu":
        return 1
    served = serving_on_one_node(config)
    if _has_room(served):
        return 1
    is_fp8, size = served.rollout.fp8, served.engine.gpus_per_engine
    counts = (nodes for nodes in range(2, MOST_NODES) if _has_room(_serving(config, is_fp8, nodes * size)))
    return next(counts, MOST_NODES)


def _serving(config: Config, is_fp8: bool, gpus: int = 0, dp_attention: bool = True) -> Config:
    """Return the configuration of an engine that prefills and decodes on so many GPUs; 0: on as many as in training."""
    engine = dataclasses.replace(
        config.engine,
        gpus_per_engine=gpus or config.engine.gpus_per_engine,
        dp_attention=dp_attention and config.engine.dp_attention,
        pd=PrefillDecode(),
        sleep="never",
    )
    return dataclasses.replace(config, engine=engine, rollout=dataclasses.replace(config.rollout, fp8=is_fp8))


def _has_room(config: Config) -> bool:
    weights = engine_memory(config).weights_gib_per_gpu
    return weights <= config.engine.mem_fraction_static * config.hardware.memory_gib_per_gpu

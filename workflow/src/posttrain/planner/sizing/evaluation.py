"""What an evaluation takes: engines on one node that serve the model in the precision of its source."""

from __future__ import annotations

import dataclasses

from posttrain.config.schema import Config, PrefillDecode
from posttrain.planner.sizing.engine import engine_memory

# Beyond this nobody would serve a model for an evaluation.
MOST_NODES = 64


def serving_on_one_node(config: Config) -> Config:
    """Return the configuration of engines that serve on one node alone, as evaluations do.

    On GPUs these are as many as the node has room for, of training's size or, where that holds the weights in FP8
    alone, of the next size that holds them; an engine that spans nodes in training gets all of this one's GPUs.
    """
    if config.hardware.device == "cpu":
        return config
    per_node = config.hardware.gpus_per_node
    size = min(config.engine.gpus_per_engine, per_node)
    while size * 2 <= per_node and not _holds_weights(config, size):
        size *= 2
    engine = dataclasses.replace(config.engine, gpus_per_engine=size, num_engines=per_node // size, pd=PrefillDecode())
    return dataclasses.replace(config, nodes=1, engine=engine)


def evaluation_nodes(config: Config) -> int:
    """Return the smallest number of nodes whose GPUs hold the weights as one engine; one is all that is served on.

    Example:
        GLM-5 in BF16 on nodes of 8 H200: 3.
    """
    if config.hardware.device == "cpu":
        return 1
    size = serving_on_one_node(config).engine.gpus_per_engine
    counts = (nodes for nodes in range(1, MOST_NODES) if _holds_weights(config, nodes * size))
    return next(counts, MOST_NODES)


def _holds_weights(config: Config, gpus: int) -> bool:
    """Tell whether an engine of so many GPUs has room for the weights in the precision of their source."""
    engine = dataclasses.replace(config.engine, gpus_per_engine=gpus, pd=PrefillDecode())
    rollout = dataclasses.replace(config.rollout, fp8=False)
    weights = engine_memory(dataclasses.replace(config, engine=engine, rollout=rollout)).weights_gib_per_gpu
    return weights <= config.engine.mem_fraction_static * config.hardware.memory_gib_per_gpu

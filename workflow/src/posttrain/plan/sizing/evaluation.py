"""Engines of an evaluation: on one node, or one over as many nodes as the model needs, in the precision that fits."""

from __future__ import annotations

import dataclasses

from posttrain.config.engine import PrefillDecode
from posttrain.config.engine_rules import check_cut
from posttrain.config.families import shared_experts_width
from posttrain.config.formats import FP8_BLOCK
from posttrain.config.schema import Config
from posttrain.plan.flags.sglang_flags import has_dp_attention, nodes_per_engine
from posttrain.plan.sizing.engine import engine_memory

# No evaluation serves a model on more nodes.
MOST_NODES = 64


def serving_config(config: Config) -> Config:
    """Return the configuration of the evaluations' engines, on the nodes of their own job.

    On GPUs one node is filled with engines of training's size or, if that only holds the weights in another precision,
    of the next larger size. If a node cannot hold the model, one engine spans the fewest nodes that can. Attention is
    split if the GPUs have no memory for a copy each.
    """
    is_fp8 = evaluates_fp8(config)
    if config.hardware.device == "cpu":
        served, nodes = _serving(config, is_fp8), evaluation_nodes(config)
        count = served.engine.num_engines if nodes == 1 else 1
        return dataclasses.replace(served, nodes=nodes, engine=dataclasses.replace(served.engine, num_engines=count))
    return _on_fewest_nodes(config, is_fp8) or _on_nodes(config, is_fp8, 1, config.hardware.gpus_per_node)


def evaluates_fp8(config: Config) -> bool:
    """Return whether evaluations before and after training serve the weights in FP8 (`evaluation.precision`).

    Example:
        GLM-5 on nodes of 8 H200: yes; in BF16 it would need 2 of them.
    """
    if config.evaluation.precision != "auto":
        return config.evaluation.precision == "fp8"
    if config.hardware.device == "cpu" or not config.rollout.fp8:
        return False
    source, fp8 = (_on_fewest_nodes(config, is_fp8) for is_fp8 in (False, True))
    return fp8 is not None and (source is None or fp8.nodes < source.nodes)


def quantises_for_engines(config: Config) -> bool:
    """Return whether the original model is quantised to FP8: for rollouts, for the evaluation before them, or both."""
    return config.rollout.fp8 or evaluates_fp8(config)


def evaluation_nodes(config: Config) -> int:
    """Return the number of nodes of an evaluation's job; 0 if none up to `MOST_NODES` suffices.

    Example:
        GLM-5 on nodes of 8 H200: 1, in FP8; 2 with `evaluation.precision=source`.
    """
    if config.evaluation.addresses:
        return 1
    if config.hardware.device == "cpu":
        return nodes_per_engine(config) if config.engine.kind == "sglang" else 1
    served = _on_fewest_nodes(config, evaluates_fp8(config))
    return served.nodes if served else 0


def _on_fewest_nodes(config: Config, is_fp8: bool) -> Config | None:
    """Return the configuration of engines on the fewest nodes that hold the model; None above `MOST_NODES`."""
    per_node = config.hardware.gpus_per_node
    size = min(config.engine.gpus_per_engine, per_node)
    sizes = [size * 2**doubled for doubled in range(per_node.bit_length()) if size * 2**doubled <= per_node]
    on_one = [*((size, True) for size in sizes), (sizes[-1], False)]
    tried = (_on_nodes(config, is_fp8, 1, size, dp_attention) for size, dp_attention in on_one)
    if served := next(filter(_has_room, tried), None):
        return served
    # An engine over several nodes uses all their GPUs; SGLang cannot split every model over that many.
    counts = ((nodes, dp_attention) for nodes in range(2, MOST_NODES + 1) for dp_attention in (True, False))
    tried = (_on_nodes(config, is_fp8, nodes, nodes * per_node, dp_attention) for nodes, dp_attention in counts)
    return next((served for served in tried if _has_room(served) and _can_be_cut(served)), None)


def _on_nodes(config: Config, is_fp8: bool, nodes: int, gpus: int, dp_attention: bool = True) -> Config:
    """Return the configuration of engines with `gpus` GPUs each that fill `nodes` nodes."""
    served = _serving(config, is_fp8, gpus, dp_attention)
    count = nodes * config.hardware.gpus_per_node // gpus
    return dataclasses.replace(served, nodes=nodes, engine=dataclasses.replace(served.engine, num_engines=count))


def _serving(config: Config, is_fp8: bool, gpus: int = 0, dp_attention: bool = True) -> Config:
    """Return the configuration of an engine that prefills and decodes on `gpus` GPUs; 0 means training's."""
    engine = dataclasses.replace(
        config.engine,
        gpus_per_engine=gpus or config.engine.gpus_per_engine,
        dp_attention=dp_attention and config.engine.dp_attention,
        own_nodes=0,
        pd=PrefillDecode(),
        sleep="never",
    )
    return dataclasses.replace(config, engine=engine, rollout=dataclasses.replace(config.rollout, fp8=is_fp8))


def _has_room(config: Config) -> bool:
    weights = engine_memory(config).weights_gib_per_gpu
    return weights <= config.engine.mem_fraction_static * config.hardware.memory_gib_per_gpu


def _can_be_cut(config: Config) -> bool:
    """Return whether the model's heads, experts and FP8 blocks can be split over the engine's GPUs."""
    arch, parts = config.model.architecture, config.engine.gpus_per_engine
    if any(check_cut(config)):
        return False
    if not config.rollout.fp8 or has_dp_attention(config):
        return True
    widths = (arch.intermediate_size, shared_experts_width(arch))
    return all(width % (FP8_BLOCK * parts) == 0 for width in widths)

"""The mode in which transformers checks an export, in FP32, and its memory on one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.sizing.model_size import Weight, decoder_weights, edge_weights, model_weights
from posttrain.readable import format_bytes

_FP32_BYTES = 4
# Memory of Python, torch and transformers, and of activations of a few short prompts.
_FIXED_BYTES = 2 << 30
# Usable share of a node's memory; the rest is for the system and the page cache.
_SHARE = 0.8


def export_check_way(config: Config) -> str:
    """Return the mode of an export's check: whole, layers or off."""
    wanted = config.export.check
    if wanted != "auto":
        return wanted
    return "whole" if _whole_bytes(config) <= _SHARE * _node_bytes(config) else "layers"


def export_check_bytes(config: Config) -> int:
    """Return the memory of the check; 0 if it is off.

    Example:
        GLM-5, layer by layer: two of its MoE layers, embedding and output matrix, 93 GB.
    """
    way = export_check_way(config)
    return {"whole": _whole_bytes(config), "layers": _layers_bytes(config), "off": 0}[way]


def check_export_memory(config: Config) -> Iterator[Problem]:
    """Yield a problem if one node's memory is too small for the check."""
    needed, there = export_check_bytes(config), _node_bytes(config)
    if needed > there:
        remedy = "set export.check=off, or give the host memory of a larger node (site.host_memory_gib)"
        if export_check_way(config) == "whole":
            remedy = "set export.check=auto"
        allowed = f"what a node's host memory of {format_bytes(there)} holds"
        yield Problem(
            "check-exceeds-host-memory",
            "export.check",
            f"{config.export.check} takes {format_bytes(needed)}",
            allowed,
            remedy,
        )


def _node_bytes(config: Config) -> float:
    return (config.site.host_memory_gib or config.hardware.host_memory_gib) * 2**30


def _whole_bytes(config: Config) -> int:
    # A layer's experts exist twice while they are stacked to one tensor.
    return _fp32_bytes(model_weights(config.model.architecture)) + _largest_layer(config) + _FIXED_BYTES


def _layers_bytes(config: Config) -> int:
    edges = [weight for edge in edge_weights(config.model.architecture) for weight in edge]
    return _fp32_bytes(edges) + 2 * _largest_layer(config) + _FIXED_BYTES


def _largest_layer(config: Config) -> int:
    return max(map(_fp32_bytes, decoder_weights(config.model.architecture)))


def _fp32_bytes(weights: Iterable[Weight]) -> int:
    return _FP32_BYTES * sum(weight.num_elements for weight in weights)

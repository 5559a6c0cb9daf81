"""Chooses an engine's number of GPUs by the planner's memory model, or the nearest alternatives that fit.

The smallest size that fits equals that of all guides: every row of SGLang's cookbook for GLM-5, vLLM's two commands and
the model card of the NVFP4 checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from posttrain.config.schema import Architecture, Config, Hardware
from posttrain.errors import ConfigError, Problem
from posttrain.plan.sizing.engine import SERVING_SHARE, fits, serving_gib_per_gpu
from posttrain.readable import counted
from posttrain_serving.serve_request import ServeRequest, computed_with

MOST_NODES = 64


@dataclass(frozen=True)
class Size:
    """Size of one engine.

    Args:
        num_gpus: Number of GPUs.
        nodes: Number of nodes.
        attention: "tensor_parallel" or "data_parallel"; see `plan.sizing.engine`.
        gib_per_gpu: Memory of weights and one long request per GPU.
    """

    num_gpus: int
    nodes: int
    attention: str
    gib_per_gpu: float


def choose_size(serve_request: ServeRequest, precision: str, config: Config, others: Sequence[Hardware] = ()) -> Size:
    """Return the smallest engine that fits, or the engine on the requested nodes.

    Args:
        serve_request: The request.
        precision: Precision of the weights.
        config: Has the hardware and the model.
        others: Further hardware to suggest.

    Raises:
        ConfigError: It does not fit; the message suggests the nearest alternatives.
    """
    hardware = config.hardware
    found = _size(serve_request, precision, config.model.architecture, hardware)
    if found:
        return found
    allowed = SERVING_SHARE * hardware.memory_gib_per_gpu
    most = _sizes(serve_request, config.model.architecture, hardware)[-1:]
    tried = most[0] if most else hardware.gpus_per_node
    attention = attention_of(serve_request, config.model.architecture)
    kept = kept_as(serve_request, precision, hardware)
    needed = serving_gib_per_gpu(config.model.architecture, tried, kept, attention)
    value = f"{precision} on {tried} of {hardware.name}: {needed:.1f} GiB a GPU for weights and one request"
    nearest = _nearest(serve_request, precision, config, others)
    remedy = "; ".join(nearest) or f"another engine, or a model that {hardware.name} holds"
    at_most = f"at most {allowed:.1f} GiB, {SERVING_SHARE:.0%} of {hardware.memory_gib_per_gpu:g}"
    raise ConfigError(
        [Problem("engine-exceeds-memory", "--nodes" if serve_request.nodes else "--hardware", value, at_most, remedy)]
    )


def attention_of(serve_request: ServeRequest, arch: Architecture) -> str:
    """Return the attention layout: for throughput, each GPU of an MoE model attends to its own requests."""
    apart = serve_request.engine == "sglang" and serve_request.goal == "throughput" and arch.n_routed_experts > 0
    return "data_parallel" if apart else "tensor_parallel"


def kept_as(serve_request: ServeRequest, precision: str, hardware: Hardware) -> str:
    """Return the precision of weights in memory: the embedded engine dequantises them."""
    if serve_request.engine != "embedded":
        return precision
    return "fp32" if hardware.device == "cpu" else "bf16"


def _size(serve_request: ServeRequest, precision: str, arch: Architecture, hardware: Hardware) -> Size | None:
    precision = kept_as(serve_request, precision, hardware)
    attention = attention_of(serve_request, arch) if hardware.device == "cuda" else "tensor_parallel"
    for num_gpus in _sizes(serve_request, arch, hardware):
        if fits(arch, hardware, num_gpus, precision, attention):
            needed = serving_gib_per_gpu(arch, num_gpus, precision, attention)
            return Size(num_gpus, -(-num_gpus // hardware.gpus_per_node), attention, needed)
    return None


def _sizes(serve_request: ServeRequest, arch: Architecture, hardware: Hardware) -> list[int]:
    """Return the sizes by which the number of heads is divisible, smallest first."""
    if serve_request.engine == "embedded" or hardware.device == "cpu":
        return [1]
    node = hardware.gpus_per_node
    if serve_request.nodes:
        # Prefill and decode engines get half of the nodes each.
        candidates = [
            node * max(serve_request.nodes // 2, 1) if serve_request.prefill_apart else node * serve_request.nodes
        ]
        if serve_request.nodes == 1 and serve_request.engine != "trtllm":
            candidates = [size for size in range(1, node + 1) if node % size == 0]
    elif serve_request.engine == "trtllm":
        candidates = [node]
    else:
        within = [size for size in range(1, node + 1) if node % size == 0]
        candidates = within + [node * nodes for nodes in range(2, MOST_NODES + 1)]
    return [size for size in candidates if arch.num_attention_heads % size == 0]


def _nearest(serve_request: ServeRequest, precision: str, config: Config, others: Sequence[Hardware]) -> Iterator[str]:
    arch, hardware = config.model.architecture, config.hardware
    free = replace(serve_request, nodes=0)
    if serve_request.nodes and (larger := _size(free, precision, arch, hardware)):
        nodes = larger.nodes * (2 if serve_request.prefill_apart else 1)
        yield f"--nodes {nodes} ({counted(larger.num_gpus, 'GPU')})"
    if serve_request.goal == "throughput" and _size(replace(serve_request, goal="latency"), precision, arch, hardware):
        yield "--goal latency, which needs less"
    # The embedded engine uses one GPU on any hardware; SGLang distributes the same weights over several.
    if serve_request.engine == "embedded" and (
        spread := _size(replace(free, engine="sglang"), precision, arch, hardware)
    ):
        yield f"--engine sglang ({counted(spread.num_gpus, 'GPU')})"
    for other in computed_with(serve_request, hardware):
        if other != precision and _size(serve_request, other, arch, hardware):
            yield f"--precision {other}"
    roomy = [one for one in others if one.memory_gib_per_gpu > hardware.memory_gib_per_gpu]
    for one in sorted(roomy, key=lambda other: other.memory_gib_per_gpu):
        if precision in computed_with(serve_request, one) and _size(serve_request, precision, arch, one):
            yield f"--hardware {one.name}"
            return

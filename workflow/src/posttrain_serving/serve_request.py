"""The request to serve a checkpoint on some hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.schema import Config, Hardware
from posttrain.errors import Problem

ENGINES = ("sglang", "vllm", "trtllm", "embedded")
# Loopback addresses.
LOCAL = ("127.0.0.1", "localhost")
PRECISIONS = ("bf16", "fp8", "nvfp4")
GOALS = ("latency", "throughput")
# Precisions that an engine supports: from TensorRT-LLM's guide, and of our embedded engine.
TAKEN = {"trtllm": ("nvfp4",), "embedded": ("bf16", "fp8")}
# Prefix of the compute capability: SM100 and its successor, which the guide names; RTX GPUs have 12.
DATA_CENTER_BLACKWELL = "10."
_WHY = {
    "nvfp4": ": NVFP4 needs a Blackwell GPU",
    "fp8": ": its matrix units do not know E4M3FN, or SGLang's cookbook has no FP8 for it",
}


@dataclass(frozen=True)
class ServeRequest:
    """Options for serving a checkpoint.

    Args:
        engine: One of `ENGINES`.
        nodes: Number of nodes; 0: as few as possible.
        precision: One of `PRECISIONS`; empty: the checkpoint's.
        goal: One of `GOALS`.
        host: Address to listen on.
        port: Port to listen on.
        name: Served model name; empty: derived from the checkpoint.
        prefill_apart: Use separate prefill and decode engines.
        index_cache: Layers of GLM-5 share the choice of keys of earlier layers.
        python: Interpreter of SGLang's environment; empty: the first on PATH.
        first_node: Rendezvous address of an engine's nodes; empty: a placeholder name.
    """

    engine: str = "sglang"
    nodes: int = 0
    precision: str = ""
    goal: str = "latency"
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    prefill_apart: bool = False
    index_cache: bool = False
    python: str = ""
    first_node: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServeRequest:
        """Return the request of command-line options."""
        return cls(**{name: value for name, value in options.items() if value is not None})


def check_serve_request(
    serve_request: ServeRequest, precision: str, config: Config, others: Sequence[Hardware] = ()
) -> Iterator[Problem]:
    """Yield options that the hardware or the engine does not support, each with the nearest alternative.

    Args:
        serve_request: The request.
        precision: Precision of the checkpoint.
        config: Has the hardware and the model.
        others: Further hardware to suggest.
    """
    yield from _check_format(serve_request, precision, config.hardware, others)
    yield from _check_engine(serve_request, config.hardware)
    yield from _check_options(serve_request, precision, config)


def computed_with(serve_request: ServeRequest, hardware: Hardware) -> list[str]:
    """Return the precisions in which an engine can serve on some hardware, widest first."""
    if hardware.device == "cpu":
        known = (
            ["bf16", "fp8"] if serve_request.engine == "embedded" else ["bf16"]
        )  # the embedded engine dequantises at load
    else:
        known = [*hardware.formats, *(["fp8"] if serve_request.engine == "embedded" else [])]
    return [name for name in PRECISIONS if name in known and name in TAKEN.get(serve_request.engine, PRECISIONS)]


def _check_format(
    serve_request: ServeRequest, precision: str, hardware: Hardware, others: Sequence[Hardware]
) -> Iterator[Problem]:
    known = computed_with(serve_request, hardware)
    if precision in known:
        return
    able = [
        one.name
        for one in others
        if precision in computed_with(serve_request, one) and not list(_check_engine(serve_request, one))
    ]
    remedies = [f"--precision {known[-1]}"] if known else []
    remedies += [f"--hardware {' or '.join(able)}"] if able else []
    remedies += ["--engine sglang"] if serve_request.engine in TAKEN else []
    is_engine = precision not in TAKEN.get(serve_request.engine, PRECISIONS)
    why = (
        f": {serve_request.engine} takes {' and '.join(TAKEN[serve_request.engine])}"
        if is_engine
        else _WHY.get(precision, "")
    )
    allowed = f"{', '.join(known) or 'none'} by {serve_request.engine} on {hardware.name}{why}"
    yield Problem("no-kernel-for-format", "--precision", precision, allowed, ", or ".join(remedies))


def _check_engine(serve_request: ServeRequest, hardware: Hardware) -> Iterator[Problem]:
    capability, is_cpu = hardware.compute_capability, hardware.device == "cpu"
    if serve_request.engine == "vllm" and not capability:
        allowed = f"sglang{' or embedded' if is_cpu else ''} on {hardware.name}: no guide has GLM-5 with vLLM on it"
        remedy = "--engine sglang, or --hardware b200, which the guide is for"
        yield Problem("no-guide-for-engine", "--engine", "vllm", allowed, remedy)
    if serve_request.engine == "trtllm" and not capability.startswith(DATA_CENTER_BLACKWELL):
        allowed = f"sglang{' or vllm' if capability else ''} on {hardware.name}: TensorRT-LLM's guide is for SM100"
        yield Problem("no-guide-for-engine", "--engine", "trtllm", allowed, "--engine sglang, or --hardware b200")


def _check_options(serve_request: ServeRequest, precision: str, config: Config) -> Iterator[Problem]:
    if serve_request.prefill_apart and (serve_request.engine != "sglang" or config.hardware.device == "cpu"):
        where = "sglang on GPUs"
        remedy = f"leave it out, or serve with {where}"
        yield Problem("prefill-needs-sglang", "--prefill-apart", serve_request.engine, where, remedy)
    if serve_request.prefill_apart and serve_request.nodes % 2:
        allowed = "an even number: half of the nodes prefill, half decode"
        yield Problem(
            "nodes-not-even", "--nodes", str(serve_request.nodes), allowed, f"--nodes {serve_request.nodes + 1}"
        )
    arch = config.model.architecture
    is_glm5 = arch.model_type == "glm_moe_dsa" and arch.index_topk_freq == 1 and arch.num_hidden_layers == 78
    if serve_request.index_cache and (serve_request.engine != "sglang" or precision != "fp8" or not is_glm5):
        allowed = "GLM-5 in FP8 with sglang, which is what the cookbook's pattern of layers is for"
        value = f"{config.model.name} in {precision} with {serve_request.engine}"
        yield Problem("index-cache-unproven", "--index-cache", value, allowed, "leave it out")
    if not 1 <= serve_request.port <= 65535:
        yield Problem("out-of-range", "--port", str(serve_request.port), "1 to 65535", "give a port")
    if serve_request.nodes < 0:
        remedy = "give their number"
        yield Problem("out-of-range", "--nodes", str(serve_request.nodes), "1 or more; 0: as few as are needed", remedy)
    if serve_request.engine in ("embedded", "trtllm") and serve_request.nodes > 1:
        remedy = "--nodes 1, or --engine sglang"
        yield Problem("one-machine", "--nodes", str(serve_request.nodes), f"1 with {serve_request.engine}", remedy)

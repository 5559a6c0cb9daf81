"""Flags of vLLM's server, for version 0.32.0.

Source: `vllm-glm5-b200-deployment.txt`. It has one command per precision and none per goal, so the goal has no effect
here.
"""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import Flag, flag
from posttrain.plan.flags.sglang_flags import nodes_per_engine
from posttrain_serving.flags.serving_flags import FEWEST, parsers

GUIDE = "the guide to GLM-5 with vLLM on B200"
MAX_MODEL_LEN, MEMORY_UTILIZATION = 32768, 0.90
CONTAINER = "vllm/vllm-openai:v0.16.0"
# Oldest versions with GLM-5; the number of kernels that a cold start compiles, and the minutes it takes.
OLDEST, OLDEST_TRANSFORMERS, JIT_KERNELS, JIT_MINUTES = "0.16.0", "5", 2259, 5


def vllm_flags(config: Config) -> list[Flag]:
    """Return vLLM's command line without checkpoint and address."""
    arch, share = config.model.architecture, config.engine.mem_fraction_static
    length = min(MAX_MODEL_LEN, arch.max_position_embeddings)
    flags = [
        flag("--tensor-parallel-size", config.engine.gpus_per_engine, "engine.gpus_per_engine", reason=FEWEST),
        flag("--max-model-len", length, "model.architecture.max_position_embeddings", reason=GUIDE),
        flag("--gpu-memory-utilization", f"{share:.2f}", "engine.mem_fraction_static", reason=_of_memory(share)),
    ]
    if arch.index_n_heads:
        reason = f"{GUIDE}: for sparse attention; it runs code of the repository, so read what it brings"
        flags.append(flag("--trust-remote-code", True, "model.architecture.index_n_heads", reason=reason))
    if named := parsers(config):
        reason = "without it vLLM refuses a tool-call parser"
        flags += [*named, flag("--enable-auto-tool-choice", True, reason=reason)]
    nodes = nodes_per_engine(config)
    return [*flags, *([flag("--nnodes", nodes, "engine.gpus_per_engine")] if nodes > 1 else [])]


def compiled_at_start(config: Config, engine: str, precision: str) -> str:
    """Return a description of the kernels that an engine compiles at its first start; empty if that is quick."""
    if engine != "vllm" or precision != "fp8" or config.hardware.device != "cuda":
        return ""
    return f"the first start compiles DeepGEMM, about {JIT_MINUTES} minutes for {JIT_KERNELS:,} kernels ({GUIDE})"


def _of_memory(share: float) -> str:
    return GUIDE if share == MEMORY_UTILIZATION else "what weights and one long request need"

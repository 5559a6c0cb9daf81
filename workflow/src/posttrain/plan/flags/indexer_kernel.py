"""Chooses what the trainer's indexer runs on: two Triton kernels, or torch (docs/decisions/028)."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.flags.environment import capability
from posttrain.plan.flags.sparse_kernels import SparseKernel

FUSED, TORCH = "fused", "torch"
KEY = "trainer.indexer_kernel"
# GPUs whose multiprocessors have the shared memory that a tile of keys this wide takes.
CAPABILITIES, WIDTH = ((8, 0), (9, 0), (10, 0), (10, 3)), 128

# Chunks of attention (`trainer.attention_chunk_tokens`) that they choose for at once: a score takes 4 bytes of memory
# there and 260 in torch, and few queries would leave multiprocessors idle.
CHUNKS_AT_ONCE = 4


def indexer_kernel(config: Config) -> SparseKernel:
    """Return what chooses keys: "fused", "torch", or "" where the model attends to all keys."""
    asked, arch = config.trainer.indexer_kernel, config.model.architecture
    if not arch.index_n_heads:
        return SparseKernel("", "the model attends to all keys")
    if config.hardware.device != "cuda":
        return SparseKernel(TORCH, "the kernels do not run on a CPU")
    if asked != "auto":
        return SparseKernel(asked, f"{KEY} asks for it")
    if reason := _unfit(config):
        return SparseKernel(TORCH, reason)
    return SparseKernel(FUSED, "it moves a twentieth of the bytes that torch does for each pair of a query and a key")


def check_indexer_kernel(config: Config) -> list[Problem]:
    """Return why the kernels cannot serve a configuration that asks for them."""
    reason = _unfit(config) if indexer_kernel(config).name == FUSED else ""
    if not reason:
        return []
    return [Problem("indexer-kernel-cannot-run", KEY, FUSED, f"auto or torch: {reason}", f"{KEY}=auto")]


def _unfit(config: Config) -> str:
    arch = config.model.architecture
    if config.trainer.params_dtype != "bf16":
        return f"the kernels take BF16, and trainer.params_dtype is {config.trainer.params_dtype}"
    if arch.index_head_dim > WIDTH:
        return f"the kernels take heads of up to {WIDTH} numbers, and the model's have {arch.index_head_dim}"
    if config.hardware.compute_capability and capability(config) not in CAPABILITIES:
        return f"GPUs of compute capability {config.hardware.compute_capability} have too little shared memory for them"
    return ""

"""Chooses the kernel of the trainer's sparse attention from shapes alone, so that the plan can check it.

Megatron Core 0.19.2 has two back ends for attention to selected keys in the latent space
(`core/transformer/experimental_attention_variant/`): TileLang's (`ops/tilelang_dsa.py`) and cuDNN's with FlashMLA
(`dsa_cudnn_kernels.py`). Both decline unsupported shapes silently, and Megatron then computes scores of whole rows:
250 GiB for 32,768 tokens and 64 heads. Here such a shape is a problem, which names the nearest supported one.

Their indexers are not used; ours selects the keys. Theirs break ties as their top-k happens to, and compute head
weights of BF16 models in BF16; Megatron's layer around them normalises latents with the layers' epsilon
(docs/decisions/028).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.config.schema import Architecture, Config
from posttrain.errors import Problem
from posttrain.plan.flags.environment import capability

TILELANG, CUDNN, MASKED = "tilelang", "cudnn", "masked"
FUSED = (TILELANG, CUDNN)
KEY = "trainer.sparse_attention"
# `fused_sparse_mla_absorbed` and `_supports_flash_mla_value_layout`.
LATENT, POSITIONS = 512, 64
# `_get_topk_alignment` pads to this, and requires this architecture; TileLang's kernels need a multiple of this.
CUDNN_TOPK, CUDNN_CAPABILITY, TILELANG_TOPK = 512, (9, 0), 64
# `_flash_mla_head_padding` up to Hopper and from Blackwell on; TileLang pads to 16.
HOPPER_HEADS, BLACKWELL_HEADS, TILELANG_HEADS = 64, (64, 128), 16


@dataclass(frozen=True)
class SparseKernel:
    """A chosen kernel.

    Args:
        name: "tilelang", "cudnn" or "masked" (torch's attention, all keys, with a mask); "" without sparse keys.
        reason: The reason, as a sentence.
    """

    name: str
    reason: str


def sparse_kernel(config: Config) -> SparseKernel:
    """Return the kernel of the trainer's sparse attention."""
    asked, arch = config.trainer.sparse_attention, config.model.architecture
    if not arch.index_n_heads:
        return SparseKernel("", "the model attends to all keys")
    if config.hardware.device != "cuda":
        return SparseKernel(MASKED, "no kernel for chosen keys runs on a CPU")
    if asked != "auto":
        return SparseKernel(asked, f"{KEY} asks for it")
    if reason := _unfit(config):
        return SparseKernel(MASKED, reason)
    if not refusals(config, TILELANG) or refusals(config, CUDNN):
        heads = _local_heads(config)
        padded, others = max(heads, TILELANG_HEADS), cudnn_heads(heads, capability(config))
        reason = f"it computes {padded} heads where a rank has {heads}, cuDNN's {others or 'none'}"
        return SparseKernel(TILELANG, f"{reason}; its packages are on the index, FlashMLA is not")
    return SparseKernel(CUDNN, "TileLang's kernel does not take the shapes, cuDNN's does")


def check_sparse_kernel(config: Config) -> list[Problem]:
    """Return the settings that the kernel would decline, each with the nearest supported value."""
    name = sparse_kernel(config).name
    return refusals(config, name) if name in _RULES else []


def refusals(config: Config, name: str) -> list[Problem]:
    """Return the reasons for which one of Megatron's kernels would decline."""
    arch, found = config.model.architecture, []
    own, alternative = f"what {name} takes", f"or {KEY}={MASKED}, which is slow"
    if (arch.kv_lora_rank, arch.qk_rope_head_dim) != (LATENT, POSITIONS):
        value = f"{name}: keys of {arch.kv_lora_rank} + {arch.qk_rope_head_dim} numbers"
        remedy = f"{KEY}={MASKED}, or another model"
        found.append(Problem("kernel-takes-glm5-keys", KEY, value, f"{LATENT} + {POSITIONS}, {own}", remedy))
    if not config.hardware.compute_capability:
        allowed = f"that of an NVIDIA GPU, {own}"
        found.append(Problem("kernel-needs-nvidia", "hardware.compute_capability", "none", allowed, f"{KEY}={MASKED}"))
    if config.trainer.params_dtype != "bf16":
        value = config.trainer.params_dtype
        remedy = f"trainer.params_dtype=bf16, {alternative}"
        found.append(Problem("kernel-needs-bf16", "trainer.params_dtype", value, f"bf16, {own}", remedy))
    return [*found, *_RULES[name](config)]


def cudnn_heads(heads: int, architecture: tuple[int, int]) -> int:
    """Return the number of heads that FlashMLA computes for `heads`; 0 if it declines.

    Example:
        16 heads: 64 on Hopper and on Blackwell. 96: 0 on Hopper, because 64 does not divide it.
    """
    sizes = BLACKWELL_HEADS if architecture[0] >= 10 else (HOPPER_HEADS,)
    padded = next((size for size in sizes if heads <= size and size % heads == 0), 0)
    return padded or (heads if heads % sizes[-1] == 0 else 0)


def _unfit(config: Config) -> str:
    """Return why no kernel supports this model on this hardware, regardless of other settings."""
    arch: Architecture = config.model.architecture
    if not config.hardware.compute_capability:
        return f"Megatron's kernels are not known to run on {config.hardware.name}"
    if (arch.kv_lora_rank, arch.qk_rope_head_dim) != (LATENT, POSITIONS):
        found = f"{arch.kv_lora_rank} + {arch.qk_rope_head_dim}"
        return f"Megatron's kernels are made for keys of {LATENT} + {POSITIONS} numbers, the model's have {found}"
    return ""


def _of_tilelang(config: Config) -> list[Problem]:
    """Check `fused_sparse_mla_absorbed`: a power of two or less than 16 heads, and a multiple of 64 keys."""
    found = _heads(config, TILELANG, lambda heads: heads < TILELANG_HEADS or heads & (heads - 1) == 0)
    topk = config.model.architecture.index_topk
    if topk % TILELANG_TOPK:
        below = topk // TILELANG_TOPK * TILELANG_TOPK
        nearest = " or ".join(str(size) for size in (below, below + TILELANG_TOPK) if size)
        allowed, remedy = f"a multiple of {TILELANG_TOPK}, what {TILELANG} takes", f"{nearest}, or {KEY}={CUDNN}"
        found.append(Problem("kernel-topk", "model.architecture.index_topk", str(topk), allowed, remedy))
    return found


def _of_cudnn(config: Config) -> list[Problem]:
    """Check `_flash_mla_head_padding` and `_get_topk_alignment`."""
    architecture, found = capability(config), []
    if (0, 0) < architecture < CUDNN_CAPABILITY:
        value, least = config.hardware.compute_capability, ".".join(map(str, CUDNN_CAPABILITY))
        remedy = f"{KEY}={TILELANG}"
        allowed = f"{least} or more, what {CUDNN} takes"
        found.append(Problem("kernel-needs-newer-gpu", "hardware.compute_capability", value, allowed, remedy))
    return [*found, *_heads(config, CUDNN, lambda heads: bool(cudnn_heads(heads, architecture)))]


_RULES: dict[str, Callable[[Config], list[Problem]]] = {TILELANG: _of_tilelang, CUDNN: _of_cudnn}


def _local_heads(config: Config) -> int:
    return config.model.architecture.num_attention_heads // config.parallel.tensor_model_parallel_size


def _heads(config: Config, name: str, takes: Callable[[int], bool]) -> list[Problem]:
    heads, tensor = _local_heads(config), config.parallel.tensor_model_parallel_size
    if takes(heads):
        return []
    total = config.model.architecture.num_attention_heads
    sizes = [size for size in range(1, total + 1) if total % size == 0 and takes(total // size)]
    near = sorted(sizes, key=lambda size: (abs(size - tensor), size))[:2]
    remedy = " or ".join([*(f"parallel.tensor_model_parallel_size={size}" for size in near), f"{KEY}={MASKED}"])
    value = f"{tensor}: {heads} of {total} heads per rank"
    return [
        Problem(
            "kernel-heads", "parallel.tensor_model_parallel_size", value, f"a number of heads that {name} takes", remedy
        )
    ]

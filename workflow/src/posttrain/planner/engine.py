"""Memory of a serving engine: weights per GPU, and how many tokens of KV cache are left.

A token's KV cache in each layer is MLA's latent with its rotary part, BF16, and the indexer's key: one FP8 code per
dimension and one FP32 scale:

    bytes per token = layers ((kv_rank + rope) 2 + (index_dim + 4))      GLM-5: 78 ((512 + 64) 2 + 132) = 100,152

It is handed out in pages of 64 tokens. The latent has no heads to cut, so a tensor-parallel engine keeps the
same cache on every GPU; with data-parallel attention each GPU keeps the cache of its own requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.schema import Architecture, Config
from posttrain.planner.memory import GIB
from posttrain.planner.model_size import model_weights

PAGE_TOKENS = 64
NOT_MODELLED = (
    "engine memory: activations, CUDA graphs, DeepEP and NCCL buffers; the MTP layer, which is not served",
    "engine.kv_tokens of the embedded engine: it has no pool, each request brings its own cache",
)


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine.

    Args:
        attention: "data_parallel" (each GPU holds all but the experts) or "tensor_parallel".
        weights_gib_per_gpu: Weights on one GPU.
        kv_bytes_per_token: KV cache of one token on the GPU that holds it.
        kv_gib_per_gpu: What `mem_fraction_static` leaves for the cache; None without a pool.
        kv_tokens_per_gpu: Tokens that fit into it; None without a pool.
        kv_tokens: Tokens that fit into the whole engine; None without a pool.
    """

    attention: str
    weights_gib_per_gpu: float
    kv_bytes_per_token: int
    kv_gib_per_gpu: float | None
    kv_tokens_per_gpu: int | None
    kv_tokens: int | None


def kv_bytes_per_token(arch: Architecture) -> int:
    """Return the bytes of KV cache that one token takes in all layers."""
    latent = 2 * (arch.kv_lora_rank + arch.qk_rope_head_dim)
    indexer = arch.index_head_dim + 4 if arch.index_n_heads else 0
    return arch.num_hidden_layers * (latent + indexer)


def kv_tokens(arch: Architecture, memory_bytes: float) -> int:
    """Return how many tokens fit into `memory_bytes`, in whole pages.

    Example:
        GLM-5: 64.49 GiB hold 691,392 tokens.
    """
    pages = int(memory_bytes // (kv_bytes_per_token(arch) * PAGE_TOKENS))
    return max(pages, 0) * PAGE_TOKENS


def weights_bytes_per_gpu(arch: Architecture, num_gpus: int, bytes_per_weight: str, attention: str) -> int:
    """Return the bytes of weights on one GPU of an engine.

    Args:
        arch: The model.
        num_gpus: GPUs of the engine.
        bytes_per_weight: "fp8" (block scales included), "bf16" or "fp32".
        attention: "data_parallel": every GPU holds all but the experts, which are spread. "tensor_parallel":
            what tensor parallelism can cut is cut as well.
    """
    total = 0
    for weight in model_weights(arch):
        size = weight.fp8_bytes if bytes_per_weight == "fp8" else weight.bf16_bytes
        size = weight.num_elements * 4 if bytes_per_weight == "fp32" else size
        is_cut = weight.split == "expert" or (weight.split == "tensor" and attention == "tensor_parallel")
        total += size // num_gpus if is_cut else size
    return total


def engine_memory(config: Config) -> EngineMemory:
    """Return the memory of one engine as the configuration starts it."""
    arch, engine, is_embedded = config.model.architecture, config.engine, config.engine.kind == "embedded"
    # The embedded engine dequantises at load; SGLang keeps FP8 codes.
    full = "fp32" if engine.dtype == "float32" else "bf16"
    stored = "fp8" if config.rollout.fp8 and not is_embedded else full
    attention = "data_parallel" if config.hardware.device == "cuda" else "tensor_parallel"
    weights = weights_bytes_per_gpu(arch, engine.gpus_per_engine, stored, attention) / GIB
    per_token = kv_bytes_per_token(arch)
    if is_embedded:
        return EngineMemory(attention, weights, per_token, None, None, None)
    free = engine.mem_fraction_static * config.hardware.memory_gib_per_gpu - weights
    tokens = kv_tokens(arch, free * GIB)
    in_engine = tokens * engine.gpus_per_engine if attention == "data_parallel" else tokens
    return EngineMemory(attention, weights, per_token, free, tokens, in_engine)

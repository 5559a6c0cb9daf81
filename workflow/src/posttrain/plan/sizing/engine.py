"""Memory of a serving engine: weights per GPU, and the number of KV cache tokens that fit into the rest.

With MLA a token's KV cache per layer is the latent and its rotary part in BF16, and the indexer's key with one FP8 code
per dimension and one FP32 scale, counted for every layer although a layer that reuses a selection needs no key. With
GQA it is a key and a value per key-value head in BF16:

    MLA   bytes per token = layers ((kv_rank + rope) 2 + (index_dim + 4))   GLM-5: 78 ((512 + 64) 2 + 132) = 100,152
    GQA   bytes per token = layers (2 heads dim) 2                          Qwen3-4B: 36 (2 8 128) 2 = 147,456

Gated delta nets have no cache, but a state per request (`state_bytes`); the layers above are those that attend. SGLang
divides the memory between states and cache in the ratio of `mamba_full_memory_ratio`.

Pages have 64 tokens. The latent has no heads, so a tensor-parallel engine replicates the cache on every GPU; key-value
heads are distributed over its GPUs, at least one per GPU. With data-parallel attention each GPU holds the whole cache
of its own requests.

With separate prefill the figures are a decode engine's: requests stay there until they end, and its cache limits the
number of concurrent ones. An engine that only prefills has its own weights and pool, `EngineMemory.prefill`.

Source of the layout: sgl-project/sglang, python/sglang/srt/mem_cache/memory_pool.py (MLATokenToKVPool,
NSATokenToKVPool, MHATokenToKVPool); a server's own figures in seeds/vllm-glm5-b200-deployment.txt.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

from posttrain.config.families import num_attention_layers
from posttrain.config.formats import FP8_BLOCK
from posttrain.config.schema import Architecture, Config, Hardware
from posttrain.plan.flags.sglang_flags import DECODE, KV_PAGE_TOKENS, PREFILL, has_dp_attention, roles, world_size
from posttrain.plan.sizing.flops import delta_net_channels
from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.model_size import model_weights, vision_weights

# An engine must hold at least one request of this length; the rest of the memory is reserved for unmodelled parts.
REQUEST_TOKENS, SERVING_SHARE = 32768, 0.95
# SGLang's default of `mamba_full_memory_ratio`: memory of states over memory of the cache.
STATE_RATIO = 0.9
# Slots of states that a running request takes beside a prefix cache (sglang 0.5.23, `kv_cache_configurator.py`).
SLOTS_PER_REQUEST = 5
# SGLang's pool is `mem_fraction_static` of the memory free before loading, minus the memory used by loading (sglang,
# srt/mem_cache/kv_cache_configurator.py); neither is published for an engine of GLM-5.
POOL_BOUND = (
    "engine.kv_tokens is an upper bound: it takes the whole GPU for free before loading, and weights for all that is "
    "loaded. Of GLM-5.2 in FP8 with MTP on four GB300 (276.6 GiB), data-parallel attention, a GPU's pool is published "
    "as 26,000 tokens at a memory fraction of 0.75 and 553,000 at 0.85 (radixark/miles, "
    "examples/experimental/openenv/glm52_tbench2/README.md). The difference is predicted to 3 %, the pools are not: "
    "15 GiB per GPU beside weights and cache are taken there that no source itemises"
)
NOT_MODELLED = (
    "engine memory: activations, CUDA graphs, DeepEP and NCCL buffers; the MTP layer, which is not served",
    "engine.kv_tokens with a KV cache in FP8, or with MTP: the cache is counted in BF16 and without the MTP layer's",
    POOL_BOUND,
    "engine.kv_tokens of the embedded engine: it has no pool, each request brings its own cache",
)


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine; of a decode engine if prefill is separate.

    Args:
        attention: "data_parallel" (each GPU holds all but the experts) or "tensor_parallel".
        weights_gib_per_gpu: Weights on one GPU.
        kv_bytes_per_token: KV cache of one token on each GPU that holds it.
        kv_gib_per_gpu: Memory for the cache, from `mem_fraction_static`; None without a pool.
        kv_tokens_per_gpu: Tokens that fit into it; None without a pool.
        kv_tokens: Tokens that fit into the whole engine; None without a pool.
        max_requests: Requests that the engine runs at once, for whose states there is memory; None without states.
        prefill: Memory of an engine that only prefills; None if every engine does both.
    """

    attention: str
    weights_gib_per_gpu: float
    kv_bytes_per_token: int
    kv_gib_per_gpu: float | None
    kv_tokens_per_gpu: int | None
    kv_tokens: int | None
    max_requests: int | None = None
    prefill: EngineMemory | None = None


def kv_bytes_per_token(arch: Architecture, num_gpus: int = 1, kv_format: str = "bf16") -> int:
    """Return the bytes of one token's KV cache in all layers, on each GPU that holds a part of it.

    Args:
        arch: The model.
        num_gpus: GPUs over which tensor parallelism distributes key-value heads; 1 with data-parallel attention.
        kv_format: "bf16" or "fp8". In FP8 a latent has a byte per dimension and an FP32 scale per 128 of them, and its
            rotary part stays BF16 (deepseek-ai/FlashMLA, README, "FP8 KV cache": 512 + 16 + 128 bytes).
    """
    assert kv_format in ("bf16", "fp8"), kv_format
    if not arch.kv_lora_rank:
        heads = math.ceil(arch.num_key_value_heads / num_gpus)
        return num_attention_layers(arch) * 2 * heads * arch.head_dim * (2 if kv_format == "bf16" else 1)
    rank, rotary = arch.kv_lora_rank, 2 * arch.qk_rope_head_dim
    latent = 2 * rank if kv_format == "bf16" else rank + 4 * math.ceil(rank / FP8_BLOCK)
    indexer = arch.index_head_dim + 4 if arch.index_n_heads else 0
    return arch.num_hidden_layers * (latent + rotary + indexer)


def state_bytes(arch: Architecture, num_gpus: int = 1) -> int:
    """Return the bytes of one request's states in all gated delta nets, on each GPU that holds a part of them.

    A head's state is FP32 (`mamba_ssm_dtype` of config.json); the convolution's last inputs are BF16.
    """
    layers = arch.num_hidden_layers - num_attention_layers(arch)
    state = 4 * arch.linear_num_value_heads * arch.linear_key_head_dim * arch.linear_value_head_dim
    inputs = 2 * (arch.linear_conv_kernel_dim - 1) * delta_net_channels(arch)
    return layers * (state + inputs) // min(num_gpus, arch.linear_num_key_heads or 1)


def kv_tokens(arch: Architecture, memory_bytes: float, num_gpus: int = 1) -> int:
    """Return the number of tokens that fit into `memory_bytes` of each GPU, in whole pages; see `kv_bytes_per_token`.

    Example:
        GLM-5: 64.49 GiB hold 691,392 tokens.
    """
    pages = int(memory_bytes // (kv_bytes_per_token(arch, num_gpus) * KV_PAGE_TOKENS))
    return max(pages, 0) * KV_PAGE_TOKENS


@lru_cache(maxsize=1024)
def weights_bytes_per_gpu(arch: Architecture, num_gpus: int, bytes_per_weight: str, attention: str) -> int:
    """Return the bytes of weights on one GPU of an engine.

    Args:
        arch: The model.
        num_gpus: GPUs of the engine.
        bytes_per_weight: "fp8" (including block scales), "nvfp4", "bf16" or "fp32".
        attention: "data_parallel": every GPU holds all weights except the experts, which are distributed.
            "tensor_parallel": weights that tensor parallelism can split are split, too.
    """
    total = 0
    for weight in (*model_weights(arch), *vision_weights(arch)):
        size = weight.bytes_in(bytes_per_weight)
        is_cut = weight.split == "expert" or (weight.split == "tensor" and attention == "tensor_parallel")
        pieces = min(num_gpus, weight.max_shards or num_gpus)
        total += size // pieces if is_cut else size
    return total


def serving_gib_per_gpu(
    arch: Architecture, num_gpus: int, bytes_per_weight: str, attention: str = "tensor_parallel"
) -> float:
    """Return the memory of the smallest useful engine on each GPU: the weights and one long request.

    Args:
        arch: The model.
        num_gpus: GPUs of the engine.
        bytes_per_weight: See `weights_bytes_per_gpu`.
        attention: See `weights_bytes_per_gpu`.
    """
    weights = weights_bytes_per_gpu(arch, num_gpus, bytes_per_weight, attention)
    spread = num_gpus if attention == "tensor_parallel" else 1
    return (weights + REQUEST_TOKENS * kv_bytes_per_token(arch, spread) + state_bytes(arch, spread)) / GIB


def fits(
    arch: Architecture, hardware: Hardware, num_gpus: int, bytes_per_weight: str, attention: str = "tensor_parallel"
) -> bool:
    """Return whether an engine fits: `serving_gib_per_gpu` within 95 % of the memory reported by the driver."""
    needed = serving_gib_per_gpu(arch, num_gpus, bytes_per_weight, attention)
    return needed <= SERVING_SHARE * hardware.memory_gib_per_gpu


def engine_memory(config: Config) -> EngineMemory:
    """Return the memory of one engine of the configuration."""
    if PREFILL not in roles(config):
        return _memory_of(config, config.engine.gpus_per_engine)
    prefill = _memory_of(config, world_size(config, PREFILL))
    return dataclasses.replace(_memory_of(config, world_size(config, DECODE)), prefill=prefill)


def _memory_of(config: Config, num_gpus: int) -> EngineMemory:
    arch, engine, is_embedded = config.model.architecture, config.engine, config.engine.kind == "embedded"
    # The embedded engine dequantises at load; SGLang keeps FP8 codes.
    full = "fp32" if engine.dtype == "float32" else "bf16"
    stored = "fp8" if config.rollout.fp8 and not is_embedded else full
    attention = "data_parallel" if has_dp_attention(config) else "tensor_parallel"
    weights = weights_bytes_per_gpu(arch, num_gpus, stored, attention) / GIB
    spread = 1 if attention == "data_parallel" else num_gpus
    per_token = kv_bytes_per_token(arch, spread)
    if is_embedded:
        return EngineMemory(attention, weights, per_token, None, None, None)
    free = engine.mem_fraction_static * config.hardware.memory_gib_per_gpu - weights
    max_requests = None
    if state := state_bytes(arch, spread):
        free /= 1 + STATE_RATIO
        slots = int(max(free, 0) * STATE_RATIO * GIB // state)
        max_requests = slots // SLOTS_PER_REQUEST * (num_gpus if attention == "data_parallel" else 1)
    tokens = kv_tokens(arch, free * GIB, spread)
    in_engine = tokens * num_gpus if attention == "data_parallel" else tokens
    return EngineMemory(attention, weights, per_token, free, tokens, in_engine, max_requests)

"""How long engines decode: bytes read from memory per step, and a time per layer that no byte explains.

For B requests of one engine of W GPUs at a context of c tokens, a decode step takes

    layers t_layer + (weights + cache) / (memory bandwidth share)

    weights   all but the experts (a copy per GPU, or 1 / W of what tensor parallelism cuts), and 1 / W of the experts
              that any of the B tokens is sent to: E (1 - (1 - k / E)^B) of E on average with even routing
    cache     of the requests on one GPU: B / W with data-parallel attention, else all B; sparse attention reads the
              latents of min(c, K) tokens and the indexer's keys of all c

All requests of a rollout start together, when their prompts are prefilled; where other engines prefill, the caches
arrive in no time. Their lengths are spread so that a share (1 - x)^a of them is still running at a part x of the
longest; a = (1 - mean) / mean, with the mean as a part of the longest, so that the last one ends at it.

Sources: Pope et al., arXiv 2211.05102, section 2 (decoding is bound by reading weights and cache); the constants in
`rates`.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.families import num_indexers
from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.sizing.model_size import model_weights
from posttrain.plan.timing.rates import COMPUTE_SHARE, LAYER_SECONDS, MEMORY_SHARE

# A rollout is summed in so many stretches of its longest response; more change its time by less than a thousandth.
SLICES = 32
STORED_BYTES = {"bf16": 2, "fp32": 4}
# An FP8 code, and one FP32 scale, of a key of the indexer.
INDEXER_SCALE_BYTES = 4


@dataclass(frozen=True)
class DecodingGpus:
    """One engine.

    Args:
        arch: The model it serves.
        hardware: What it runs on.
        num_gpus: W.
        stored: "nvfp4", "fp8", "bf16" or "fp32" weights.
        dp_attention: Each GPU attends for requests of its own.
        prefill_gpus: GPUs of other engines that prefill for this one; None: it prefills itself.
    """

    arch: Architecture
    hardware: Hardware
    num_gpus: int
    stored: str
    dp_attention: bool
    prefill_gpus: float | None = None

    def weights_bytes(self) -> tuple[float, float]:
        """Return the bytes on one GPU: (all but the experts, the experts)."""
        others = experts = 0.0
        for weight in model_weights(self.arch):
            size = weight.bytes_in(self.stored)
            if weight.split == "expert":
                experts += size / self.num_gpus
            elif weight.split == "tensor" and not self.dp_attention:
                others += size / min(self.num_gpus, weight.max_shards or self.num_gpus)
            elif weight.component != "embedding" or self.arch.tie_word_embeddings:
                others += size
        return others, experts

    def cache_bytes(self, context: float) -> float:
        """Return the bytes that a GPU reads for one of its requests at a context of so many tokens."""
        arch = self.arch
        if not arch.kv_lora_rank:
            heads = arch.num_key_value_heads
            held = heads if self.dp_attention else max(heads / self.num_gpus, 1)
            return arch.num_hidden_layers * context * 2 * held * arch.head_dim * STORED_BYTES["bf16"]
        latent = STORED_BYTES["bf16"] * (arch.kv_lora_rank + arch.qk_rope_head_dim)
        if not arch.index_n_heads:
            return arch.num_hidden_layers * context * latent
        keys = context * (arch.index_head_dim + INDEXER_SCALE_BYTES)
        return arch.num_hidden_layers * min(context, arch.index_topk) * latent + num_indexers(arch) * keys


def decode_step_seconds(engine: DecodingGpus, num_requests: float, context: float) -> float:
    """Return the time of one decode step, which gives each request one token.

    Args:
        engine: The engine.
        num_requests: B, requests of the whole engine.
        context: c, tokens of prompt and response so far, on average.
    """
    others, experts = engine.weights_bytes()
    return _step_seconds(engine, others, experts, num_requests, context)


def prefill_seconds(engine: DecodingGpus, num_prompts: float, prompt_tokens: float) -> float:
    """Return the time of prefilling an engine's prompts, on its own GPUs or on those that prefill for it."""
    work = num_prompts * sequence_flops(engine.arch, prompt_tokens).forward if prompt_tokens else 0.0
    num_gpus = engine.prefill_gpus or engine.num_gpus
    return work / (num_gpus * engine.hardware.bf16_tflops * 1e12 * COMPUTE_SHARE)


@dataclass(frozen=True)
class RolloutTime:
    """How long a rollout takes on one engine.

    Args:
        seconds: From the first prompt to the end of the longest response.
        busy_share: Requests that run, as a share of those that started, averaged over the time of decoding.
        prefill_seconds: Of these seconds, those before the first token.
    """

    seconds: float
    busy_share: float
    prefill_seconds: float = 0.0


def rollout_time(
    engine: DecodingGpus, num_requests: float, prompt_tokens: float, longest_response: float, mean_share: float
) -> RolloutTime:
    """Return how long an engine takes for responses that start together.

    Args:
        engine: The engine.
        num_requests: Responses of this engine.
        prompt_tokens: Tokens of a prompt.
        longest_response: Tokens of the longest response.
        mean_share: Mean length of a response as a share of the longest.
    """
    others, experts = engine.weights_bytes()
    exponent = (1 - mean_share) / mean_share
    total = weighted = 0.0
    for part in range(SLICES):
        x = (part + 0.5) / SLICES
        running = (1 - x) ** exponent
        context = prompt_tokens + x * longest_response
        step = _step_seconds(engine, others, experts, max(num_requests * running, 1.0), context)
        total += step * longest_response / SLICES
        weighted += running * step * longest_response / SLICES
    prefill = prefill_seconds(engine, num_requests, prompt_tokens)
    return RolloutTime(total + prefill, weighted / total, prefill)


def _step_seconds(engine: DecodingGpus, others: float, experts: float, num_requests: float, context: float) -> float:
    arch, bandwidth = engine.arch, engine.hardware.hbm_gb_per_s * 1e9 * MEMORY_SHARE
    awake = 1 - (1 - arch.num_experts_per_tok / arch.n_routed_experts) ** num_requests if arch.n_routed_experts else 0.0
    on_gpu = num_requests / engine.num_gpus if engine.dp_attention else num_requests
    read = others + experts * awake + on_gpu * engine.cache_bytes(context)
    return arch.num_hidden_layers * LAYER_SECONDS + read / bandwidth

"""Decoding time of engines: bytes read from memory and sent to experts per step, and a constant time per layer.

For B requests of one engine of W GPUs at a context of c tokens, a decode step takes

    layers (t_layer + t_dispatch) + max((weights + cache) / (memory bandwidth share), operations / rate of products)

    weights     all but the experts (a copy per GPU, or 1 / W of weights split by tensor parallelism), and 1 / W of the
                experts selected by any of the B tokens: E (1 - (1 - k / E)^B) of E on average with even routing
    cache       of the requests on one GPU: B / W with data-parallel attention, else all B; sparse attention reads the
                latents of min(c, K) tokens and the indexer's keys of all c; gated delta nets read and write their
                states, which do not grow with c
    t_dispatch  with data-parallel attention: k copies of each token to its experts in FP8 and back in BF16

With speculation the model's MTP layer drafts n tokens and one step verifies them. It has n + 1 tokens per request: they
reach more experts and send more copies, and each reads its own K latents, while weights and the indexer's keys are read
once. Drafting takes n passes through one layer and the output matrix. Together they give 1 + a + ... + a^n tokens,
where a is the probability that a drafted token is accepted (`rates.DRAFT_ACCEPTANCE`). So speculation gains most with
few requests, and least with many.

All requests of a rollout start together, after the prefill of their prompts; caches from separate prefill engines
arrive instantly. A share (1 - x)^a of the requests still runs at a fraction x of the longest response; a = (1 - mean) /
mean, with the mean as a fraction of the longest, so that the last one ends at it.

Sources: Pope et al., arXiv 2211.05102, section 2 (decoding is bound by reading weights and cache); Leviathan et al.,
arXiv 2211.17192, section 3.1 (tokens per verification); the constants in `rates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from posttrain.config.families import num_attention_layers, num_indexers
from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.sizing.engine import state_bytes
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.sizing.model_size import Weight, model_weights
from posttrain.plan.timing import attainable
from posttrain.plan.timing.rates import (
    COMPUTE_SHARE,
    DRAFT_ACCEPTANCE,
    LAYER_SECONDS,
    MEMORY_SHARE,
    MOST_SPECULATION_GAIN,
)

# Number of parts over which a rollout's longest response is summed; more change the time by less than a thousandth.
SLICES = 32
STORED_BYTES = {"bf16": 2, "fp32": 4}
# FP32 scale of an indexer key, which is stored in FP8.
INDEXER_SCALE_BYTES = 4
# Bytes of a hidden element for the dispatch to an expert and back: FP8, then BF16 (deepseek-ai/DeepEP, README,
# "low-latency kernels": EP64 sends 128 tokens to 8 experts in 173 us and back in 314 us, 42 and 47 GB/s of every copy).
DISPATCHED_BYTES = 1 + 2


@dataclass(frozen=True)
class DecodingGpus:
    """One engine.

    Args:
        arch: The served model.
        hardware: Its hardware.
        num_gpus: Number of GPUs, W.
        stored: "nvfp4", "fp8", "bf16" or "fp32" weights.
        dp_attention: Whether each GPU computes attention for its own requests.
        prefill_gpus: GPUs of other engines that prefill for this one; None if it prefills itself.
        num_drafts: Tokens that the MTP layer drafts before each step; 0 without speculation.
    """

    arch: Architecture
    hardware: Hardware
    num_gpus: int
    stored: str
    dp_attention: bool
    prefill_gpus: float | None = None
    num_drafts: int = 0

    def weights_bytes(self) -> tuple[float, float]:
        """Return the bytes on one GPU: (all weights except the experts, the experts)."""
        others = experts = 0.0
        for weight in model_weights(self.arch):
            if weight.split == "expert":
                experts += weight.bytes_in(self.stored) / self.num_gpus
            elif not (weight.component == "embedding" and self.dp_attention) or self.arch.tie_word_embeddings:
                others += self._held_bytes(weight)
        return others, experts

    def draft_bytes(self) -> tuple[float, float]:
        """Return the bytes on one GPU that a draft reads: (output matrix and a layer without experts, its experts)."""
        others, experts = self.weights_bytes()
        name = "embedding" if self.arch.tie_word_embeddings else "lm_head"
        output = sum(self._held_bytes(weight) for weight in model_weights(self.arch) if weight.component == name)
        layers = self.arch.num_hidden_layers
        return output + (others - output) / layers, experts / (layers - self.arch.first_k_dense_replace)

    def _held_bytes(self, weight: Weight) -> float:
        """Return the bytes of a non-expert weight on one GPU."""
        size = weight.bytes_in(self.stored)
        if weight.split == "tensor" and not self.dp_attention:
            return size / min(self.num_gpus, weight.max_shards or self.num_gpus)
        return size

    def cache_bytes(self, context: float, num_queries: int = 1) -> float:
        """Return the bytes that a GPU reads for one of its requests at the given context.

        Args:
            context: Tokens of prompt and response so far.
            num_queries: Tokens of the request in this step; each reads the latents that the indexer selects for it.
        """
        arch = self.arch
        if not arch.kv_lora_rank:
            heads = arch.num_key_value_heads
            held = heads if self.dp_attention else max(heads / self.num_gpus, 1)
            attended = num_attention_layers(arch) * context * 2 * held * arch.head_dim * STORED_BYTES["bf16"]
            # States are read and written whole, whatever the context.
            return attended + 2 * state_bytes(arch, 1 if self.dp_attention else self.num_gpus)
        latent = STORED_BYTES["bf16"] * (arch.kv_lora_rank + arch.qk_rope_head_dim)
        if not arch.index_n_heads:
            return arch.num_hidden_layers * context * latent
        keys = context * (arch.index_head_dim + INDEXER_SCALE_BYTES)
        chosen = num_queries * min(context, arch.index_topk) * latent
        return arch.num_hidden_layers * chosen + num_indexers(arch) * keys


def decode_step_seconds(engine: DecodingGpus, num_requests: float, context: float) -> float:
    """Return the time per token and request: a decode step, or with speculation its share of one.

    Args:
        engine: The engine.
        num_requests: Requests of the whole engine, B.
        context: Mean number of tokens of prompt and response so far, c.
    """
    return Decoder(engine).token_seconds(num_requests, context)


def accepted_tokens(num_drafts: int, acceptance: float = DRAFT_ACCEPTANCE) -> float:
    """Return a request's tokens per step: the drafts accepted before the first rejection, and one more.

    Args:
        num_drafts: Drafted tokens per step.
        acceptance: Probability that a draft is accepted.
    """
    return sum(acceptance**count for count in range(num_drafts + 1))


def speculation_gain(engine: DecodingGpus, num_requests: float, context: float) -> float:
    """Return the speed-up of requests by speculation, from the roofline model, without the limit.

    Args:
        engine: An engine that drafts.
        num_requests: Requests of the whole engine.
        context: Mean number of tokens of prompt and response so far.
    """
    plain = replace(engine, num_drafts=0)
    return decode_step_seconds(plain, num_requests, context) / decode_step_seconds(engine, num_requests, context)


def prefill_seconds(engine: DecodingGpus, num_prompts: float, prompt_tokens: float) -> float:
    """Return the prefill time of an engine's prompts, on its own GPUs or on its prefill engines."""
    work = num_prompts * sequence_flops(engine.arch, prompt_tokens).forward if prompt_tokens else 0.0
    num_gpus = engine.prefill_gpus or engine.num_gpus
    return work / (num_gpus * engine.hardware.bf16_tflops * 1e12 * COMPUTE_SHARE)


@dataclass(frozen=True)
class RolloutTime:
    """Duration of a rollout on one engine.

    Args:
        seconds: From the first prompt to the end of the longest response.
        busy_share: Running requests as a share of the started ones, averaged over the decoding time.
        prefill_seconds: The part of `seconds` before the first token.
    """

    seconds: float
    busy_share: float
    prefill_seconds: float = 0.0


def rollout_time(
    engine: DecodingGpus, num_requests: float, prompt_tokens: float, longest_response: float, mean_share: float
) -> RolloutTime:
    """Return an engine's duration for responses that start together.

    Args:
        engine: The engine.
        num_requests: Responses of this engine.
        prompt_tokens: Tokens of a prompt.
        longest_response: Tokens of the longest response.
        mean_share: Mean length of a response as a share of the longest.
    """
    decoder = Decoder(engine)
    total = weighted = 0.0
    for x in ((part + 0.5) / SLICES for part in range(SLICES)):
        running = running_share(x, mean_share)
        context = prompt_tokens + x * longest_response
        seconds = decoder.token_seconds(max(num_requests * running, 1.0), context) * longest_response / SLICES
        total += seconds
        weighted += running * seconds
    prefill = prefill_seconds(engine, num_requests, prompt_tokens)
    seconds = total + prefill
    if engine.num_drafts:
        plain = rollout_time(replace(engine, num_drafts=0), num_requests, prompt_tokens, longest_response, mean_share)
        seconds = max(seconds, plain.seconds / MOST_SPECULATION_GAIN)
    return RolloutTime(seconds, weighted / total, prefill)


def running_share(x: float, mean_share: float) -> float:
    """Return the share of requests that still run at a fraction x of the longest response."""
    return (1 - x) ** ((1 - mean_share) / mean_share)


class Decoder:
    """Durations of an engine's decode steps."""

    def __init__(self, engine: DecodingGpus):
        self.engine = engine
        self.weights = engine.weights_bytes()
        self.draft_weights = engine.draft_bytes() if engine.num_drafts else (0.0, 0.0)
        self.bandwidth = engine.hardware.hbm_gb_per_s * 1e9 * MEMORY_SHARE
        arch = engine.arch
        self.asleep = 1 - arch.num_experts_per_tok / arch.n_routed_experts if arch.n_routed_experts else 1.0
        self.flops = sequence_flops(arch, 1).forward

    def token_seconds(self, num_requests: float, context: float) -> float:
        """Return the time per token and request."""
        arch, drafts = self.engine.arch, self.engine.num_drafts
        queries = drafts + 1
        cache = self.engine.cache_bytes(context, queries)
        step = self._pass(arch.num_hidden_layers, self.weights, num_requests, queries, cache)
        of_draft = (cache - self.engine.cache_bytes(0, queries)) / num_attention_layers(arch)
        draft = self._pass(1, self.draft_weights, num_requests, 1, of_draft) if drafts else 0.0
        return (step + drafts * draft) / accepted_tokens(drafts)

    def _pass(
        self, num_layers: int, weights: tuple[float, float], num_requests: float, queries: int, cache: float
    ) -> float:
        """Return the duration of one pass through some layers.

        Args:
            num_layers: Number of layers.
            weights: Their bytes on one GPU: (all weights except the experts, the experts).
            num_requests: Requests of the whole engine, B.
            queries: Tokens of each request.
            cache: Bytes that one request reads.
        """
        engine, arch = self.engine, self.engine.arch
        others, experts = weights
        tokens = num_requests * queries
        on_gpu = num_requests / engine.num_gpus if engine.dp_attention else num_requests
        read = others + experts * (1 - self.asleep**tokens) + on_gpu * cache
        work = tokens * self.flops * num_layers / arch.num_hidden_layers / engine.num_gpus
        seconds = max(read / self.bandwidth, work / attainable.gemm(engine.hardware))
        return num_layers * (LAYER_SECONDS + self._dispatch_seconds(tokens)) + seconds

    def _dispatch_seconds(self, tokens: float) -> float:
        """Return the time to send a layer's tokens to their experts and back, averaged over layers."""
        engine, arch = self.engine, self.engine.arch
        if not (engine.dp_attention and arch.n_routed_experts and engine.num_gpus > 1):
            return 0.0
        copies = tokens / engine.num_gpus * arch.num_experts_per_tok
        share = 1 - arch.first_k_dense_replace / arch.num_hidden_layers
        sent = copies * arch.hidden_size * DISPATCHED_BYTES
        return share * sent / attainable.link(engine.hardware, engine.num_gpus)

"""How long training takes on GPUs, cause by cause, from the rates in `attainable`.

A pipeline is as slow as its slowest stage. For one layer of average and one micro-batch, a rank with t tokens of a row
(T / CP), s = t / TP of them where ranks share a sequence, takes

    matrices     2 operations per element and token of s; at least the time of reading the weights
    experts      the same of the K experts of s tokens
    attention    2 N (d_qk + d_v) / TP per pair of query and key; what each kernel multiplies is in `_attention`
    indexer      2 H_i D / TP per pair of a query and a key before it, and the scores' way through memory; places of
                 chosen keys, gathered over TP, with what the ranks deal of queries and gather of keys
    memory       what norms, residuals, activations, rotation and the gradients' sum read and write
    launches     what the host takes for the kernels longer than the GPU does
    TP           4 s p H (TP - 1): rows gathered and sums scattered around attention and MLP
    CP           keys and values of the whole row, or their latents where the kernel takes these
    EP           tokens to their experts and back
    imbalance    experts and EP of the busiest rank, over those of an average one

each in the forward pass, what is recomputed once more (a cause of its own, see `_again`), and in the backward pass:
matrices and experts twice, or once where only adapters are trained; the indexer never, it is frozen. Then, for a stage,

    output       the output matrix with its log-probabilities, where the last stage is the slowest
    pipeline     messages to the next stage; and idle: (PP - 1) / v of a stage's time per update
    data         gradients to their owners and weights back: what is longer than the pass they overlap with

MFU = forward and backward operations of the model, without recomputation, over time x peak x GPUs.

Sources: passes and collectives, Korthikanti et al., arXiv 2205.05198; the bubble, Narayanan et al., arXiv 2104.04473,
section 2.2; bytes of memory-bound kernels are counted, see `_layer_bytes`.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

from posttrain.config.families import family_of, num_attention_layers, num_indexers, shared_experts_width
from posttrain.config.schema import Architecture, Hardware
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.flops import delta_net_channels, head_widths, sequence_flops
from posttrain.plan.sizing.model_size import decoder_weights
from posttrain.plan.timing import attainable
from posttrain.plan.timing.delta_net import delta_rule_seconds
from posttrain.plan.timing.fitted import IDEAL, Fitted

# Bytes of a weight in BF16, of a gradient and other numbers in FP32.
P, GRADIENT, FP32 = 2, 4, 4
# Kernels of a layer, forward and backward: what a rehearsal of `glm5_4layer` on one node counts, two micro-batches
# through four layers (1,254 for log-probabilities, 3,871 for training, which has two forward passes).
KERNELS = (1254 / 8, (3871 - 2 * 1254) / 8)
# Of FP32 scores of an indexer head in torch: written by the product, read and written by scale and ReLU, read
# by the sum; and of the choice by their sum: as many as pass the memory in the 0.095 ns a pair that `select_topk` and
# `places_of_mask` take (`benchmarks/one_gpu.py`, H200).
HEAD_SCORE_BYTES, CHOICE_BYTES = 24, 395
# Of this trainer's kernels (`glm5/index_kernel.py`): queries and keys of a tile; bytes of a pair's score, written once,
# of which five passes read half.
TILE_QUERIES, TILE_KEYS, SCORE_BYTES = 64, 256, 4 + 5 * 2
# Kernels for chosen keys, in the space of latents.
OF_CHOSEN_KEYS = ("sparse", "tilelang")
# Of a logit: the log-probabilities of a chunk pass it four times in FP32, forward and backward.
LOGIT_BYTES = 32


@dataclass(frozen=True)
class Trainer:
    """What trains, and how it is cut.

    Args:
        arch: The model.
        hardware: What it runs on.
        num_gpus: GPUs.
        stages: Layers of each pipeline stage; empty: one stage with all layers.
        num_chunks: Chunks of layers on each of them, which interleave.
        tensor: Ranks that share each layer.
        context: Ranks that share a row.
        expert: Ranks that share the experts.
        num_micro_batches: Of a pipeline per update.
        num_updates: Per step.
        recompute: Share of the layers that are computed again in full.
        recompute_modules: Modules of every layer that are computed again (`trainer.recompute_modules`).
        kernel: Of attention, one of `attainable.ATTENTION_TFLOPS`; None: torch's.
        is_indexer_fused: Keys are chosen by kernels in BF16; else in torch, in FP32.
        chooses_again: Layers that are computed again in full choose keys again.
        trains_all: False: only adapters, which cost nothing here.
        overlaps: Gradients and weights travel while others compute.
        imbalance: Rows of the busiest rank's experts over the mean.
        fitted: What is lost against attainable rates.
    """

    arch: Architecture
    hardware: Hardware
    num_gpus: int
    stages: tuple[int, ...] = ()
    num_chunks: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    num_micro_batches: int = 1
    num_updates: int = 1
    recompute: float = 1.0
    recompute_modules: tuple[str, ...] = ()
    kernel: str | None = None
    is_indexer_fused: bool = False
    chooses_again: bool = True
    trains_all: bool = True
    overlaps: bool = True
    imbalance: float = ASSUMPTIONS.expert_imbalance
    fitted: Fitted = IDEAL

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return max(len(self.stages), 1)

    @property
    def data(self) -> int:
        """Ranks that see different rows."""
        return self.num_gpus // (self.num_stages * self.tensor * self.context)

    @property
    def bubble(self) -> float:
        """Time with the pipeline's bubble over the time without."""
        return 1 + (self.num_stages - 1) / self.num_chunks / self.num_micro_batches


def train_causes(trainer: Trainer, num_samples: int, mean_tokens: float) -> dict[str, float]:
    """Return cause -> seconds of forward and backward passes over samples of equal length, the optimizer apart.

    Args:
        trainer: What trains.
        num_samples: Of all data-parallel ranks, of a step.
        mean_tokens: Of a sample.
    """
    tokens = _row_tokens(trainer, num_samples, mean_tokens)
    forward, backward = _layer(trainer, tokens, mean_tokens), _layer(trainer, tokens, mean_tokens, is_backward=True)
    layer = {cause: forward.get(cause, 0.0) + backward.get(cause, 0.0) for cause in forward | backward}
    if again := _again(trainer, forward, tokens / trainer.context, mean_tokens):
        layer["recomputation"] = again
    return _step(trainer, layer, _output(trainer, tokens, passes=3), tokens, backward)


def forward_causes(trainer: Trainer, num_samples: int, mean_tokens: float) -> dict[str, float]:
    """Return cause -> seconds of one forward pass over samples of equal length."""
    tokens = _row_tokens(trainer, num_samples, mean_tokens)
    layer = _layer(trainer, tokens, mean_tokens)
    return _step(replace(trainer, trains_all=False), layer, _output(trainer, tokens, passes=1), tokens, layer)


def mfu(trainer: Trainer, num_samples: int, mean_tokens: float, seconds: float) -> float:
    """Return which share of the peak the model's operations are: forward, backward, nothing twice."""
    work = num_samples * sequence_flops(trainer.arch, mean_tokens).training(recompute=False)
    return work / (seconds * trainer.num_gpus * trainer.hardware.bf16_tflops * 1e12)


def _row_tokens(trainer: Trainer, num_samples: int, mean_tokens: float) -> float:
    """Return the tokens of a row, which the context-parallel ranks share."""
    return num_samples * mean_tokens / (trainer.data * trainer.num_micro_batches * trainer.num_updates)


def _step(
    trainer: Trainer, layer: dict[str, float], output: float, tokens: float, backward: dict[str, float]
) -> dict[str, float]:
    stages = trainer.stages or (trainer.arch.num_hidden_layers,)
    one_layer = sum(layer.values())
    has_output = stages[-1] * one_layer + output >= max(stages) * one_layer
    num_layers = stages[-1] if has_output else max(stages)
    causes = {cause: value * num_layers for cause, value in layer.items()}
    if has_output:
        causes["output matrix"] = output
    causes["pipeline messages"] = _messages(trainer, tokens)
    turns = trainer.num_updates * trainer.num_micro_batches
    idle = sum(causes.values()) * trainer.num_updates * (trainer.num_stages - 1) / trainer.num_chunks
    seconds = {cause: value * turns for cause, value in causes.items()}
    seconds["pipeline idle"] = idle
    seconds["data-parallel exchange"] = trainer.num_updates * _exchange(
        trainer, num_layers, num_layers * sum(backward.values())
    )
    return {cause: value for cause, value in seconds.items() if value}


def _layer(trainer: Trainer, tokens: float, length: float, is_backward: bool = False) -> dict[str, float]:
    """Return cause -> seconds of one pass of a layer of average over a micro-batch."""
    arch, hardware, on_rank = trainer.arch, trainer.hardware, tokens / trainer.context
    dense, indexer, routed = layer_elements(arch)
    shared = on_rank / trainer.tensor
    times = (2 if trainer.trains_all else 1) if is_backward else 1
    work = 2 * shared * (dense + (0 if is_backward else indexer))
    read = P * (dense / trainer.tensor + indexer) / attainable.memory(hardware)
    causes = {"matrices": times * max(trainer.fitted.products * work / attainable.gemm(hardware), read)}
    attention, scores = _attention(trainer, on_rank, length)
    attends = num_attention_layers(arch) / arch.num_hidden_layers
    causes["attention"] = attends * attention[is_backward]
    if attends < 1:
        causes["delta net"] = (1 - attends) * delta_rule_seconds(arch, hardware, shared, is_backward)
    if not is_backward:
        causes["indexer"] = scores
    moved = trainer.fitted.kernel_bytes * _layer_bytes(trainer, on_rank, is_backward)
    causes["memory-bound kernels"] = moved / attainable.memory(hardware)
    causes |= _communication(trainer, tokens)
    if routed:
        rate = attainable.experts(hardware, arch.moe_intermediate_size)
        work = 2 * shared * routed * arch.num_experts_per_tok / arch.n_routed_experts
        read = P * routed / trainer.expert / attainable.memory(hardware)
        causes["experts"] = times * max(trainer.fitted.products * work / rate, read)
        # Where a rank has all experts, it has all rows of its tokens.
        excess = trainer.imbalance - 1 if trainer.expert > 1 else 0.0
        causes["imbalance of experts"] = excess * (causes["experts"] + causes["EP dispatch"])
    launched = KERNELS[is_backward] * attainable.LAUNCH_SECONDS
    causes["launches"] = max(launched - sum(causes.values()), 0.0)
    return causes


def _again(trainer: Trainer, forward: dict[str, float], on_rank: float, length: float) -> float:
    """Return the seconds of what is computed again, of a layer of average.

    Norms pass the hidden state four times. Queries, keys and values are projected from latents, rotated, laid out and
    copied to where they were. An activation passes its input and output. Half of the TP collectives are the MLP's.
    """
    arch, shared = trainer.arch, on_rank / trainer.tensor
    heads, moved = arch.num_attention_heads, P * shared / attainable.memory(trainer.hardware)
    elements = _module_elements(arch)
    matrices = {name: 2 * shared * size / attainable.gemm(trainer.hardware) for name, size in elements.items()}
    gathered = forward["TP collectives"] / 2
    inside = 5 * shared_experts_width(arch) * moved
    latents = arch.kv_lora_rank + arch.qk_rope_head_dim
    routed = sum(forward.get(name, 0.0) for name in ("experts", "EP dispatch", "imbalance of experts"))
    seconds = {
        "layernorm": 4 * arch.hidden_size * moved,
        "mla_up_proj": matrices["mla_up_proj"] + heads * (4 * (head_widths(arch) + latents)) * moved,
        "moe_act": 3 * arch.num_experts_per_tok * arch.moe_intermediate_size * moved,
        "mlp": matrices["dense_mlp"] + gathered * (arch.first_k_dense_replace / arch.num_hidden_layers),
        "shared_experts": matrices["shared_experts"] + inside + gathered,
        "moe": routed + matrices["shared_experts"] + inside + gathered,
    }
    modules = sum(seconds[module] for module in trainer.recompute_modules)
    kept = 0.0 if trainer.chooses_again else _choosing(trainer, on_rank, length) + matrices["indexer"]
    return trainer.recompute * (sum(forward.values()) - kept) + modules


@functools.cache
def _module_elements(arch: Architecture) -> dict[str, float]:
    """Return the matrices' elements by module of a layer of average."""
    sums: Counter[str] = Counter(dense_mlp=0, shared_experts=0, indexer=0)
    for weight in chain(*decoder_weights(arch)):
        sums[weight.component] += weight.num_elements
    width, query = arch.qk_nope_head_dim + arch.v_head_dim, arch.qk_nope_head_dim + arch.qk_rope_head_dim
    up = arch.num_attention_heads * (query * arch.q_lora_rank + width * arch.kv_lora_rank)
    return {"mla_up_proj": up, **{name: size / arch.num_hidden_layers for name, size in sums.items()}}


def _attention(trainer: Trainer, on_rank: float, length: float) -> tuple[tuple[float, float], float]:
    """Return the seconds of attention, forward and backward, and of the indexer's scores."""
    arch, hardware = trainer.arch, trainer.hardware
    is_sparse = bool(arch.index_n_heads) and length > arch.index_topk
    # Torch multiplies every query with every key before it and masks; kernels for chosen keys multiply latents, and
    # those that are missing in front of a sequence's first queries, too.
    kernel = trainer.kernel or ("masked" if is_sparse else "fused")
    pairs = on_rank * (length + 1) / 2
    if kernel in OF_CHOSEN_KEYS:
        attended = on_rank * arch.index_topk
        width = 2 * arch.kv_lora_rank + arch.qk_rope_head_dim
    else:
        attended = pairs
        width = head_widths(arch)
    work = 2 * arch.num_attention_heads / trainer.tensor * width * attended
    forward, backward = attainable.attention(hardware, kernel, length)
    scores = _choosing(trainer, on_rank, length) + _gathered_places(trainer, on_rank, length) if is_sparse else 0.0
    return (work / forward, attainable.ATTENTION_BACKWARD * work / backward), scores


def _choosing(trainer: Trainer, on_rank: float, length: float) -> float:
    """Return the seconds of scores and choices, for which tensor-parallel ranks deal queries and gather keys."""
    arch, hardware, tensor = trainer.arch, trainer.hardware, trainer.tensor
    if not arch.index_n_heads or length <= arch.index_topk:
        return 0.0
    rate = attainable.gemm(hardware) if trainer.is_indexer_fused else attainable.fp32_gemm(hardware)
    per_pair = 2 * arch.index_n_heads * arch.index_head_dim / rate
    per_pair += indexer_bytes(arch, trainer.is_indexer_fused) / attainable.memory(hardware)
    dealt = (P * arch.q_lora_rank + FP32 * arch.index_n_heads) / tensor
    sent = (dealt + P * arch.index_head_dim) * (tensor - 1) / tensor
    per_query = (length + 1) / 2 / tensor * per_pair + sent / attainable.link(hardware, tensor)
    return on_rank * per_query * num_indexers(arch) / arch.num_hidden_layers


def _gathered_places(trainer: Trainer, on_rank: float, length: float) -> float:
    """Return the seconds in which tensor-parallel ranks gather the places of the keys that each has chosen."""
    tensor, places = trainer.tensor, trainer.arch.index_topk * (2 if length <= 2**15 else 4)
    return on_rank * places * (tensor - 1) / tensor / attainable.link(trainer.hardware, tensor)


def indexer_bytes(arch: Architecture, is_fused: bool) -> float:
    """Return the bytes that scores and choice read and write of a pair of a query and a key."""
    if not is_fused:
        return HEAD_SCORE_BYTES * arch.index_n_heads + CHOICE_BYTES
    # Each tile reads its queries, all heads, and its keys, one head.
    return P * arch.index_head_dim * (arch.index_n_heads / TILE_KEYS + 1 / TILE_QUERIES) + SCORE_BYTES


def _layer_bytes(trainer: Trainer, on_rank: float, is_backward: bool) -> float:
    """Return the bytes that a layer's kernels without products read and write, the experts' apart.

    Two norms and two residuals pass the hidden state ten times; queries, keys and values are written, rotated and laid
    out (four times); a gated MLP's two halves are read and their product written (five times its width). A backward
    pass has each twice, and adds to the gradient of every weight of the rank in FP32.
    """
    arch = trainer.arch
    query = arch.num_attention_heads * ((arch.qk_nope_head_dim + arch.qk_rope_head_dim) or arch.head_dim)
    others = arch.num_attention_heads if arch.kv_lora_rank else arch.num_key_value_heads
    attends = num_attention_layers(arch) / arch.num_hidden_layers
    mixed = attends * (query * (1 + family_of(arch).gated_attention) + others * head_widths(arch))
    mixed += (1 - attends) * (delta_net_channels(arch) + arch.linear_num_value_heads * arch.linear_value_head_dim)
    mlp = shared_experts_width(arch) if arch.n_routed_experts else arch.intermediate_size
    widths = 10 * arch.hidden_size + 4 * mixed + 5 * mlp
    moved = P * on_rank / trainer.tensor * widths
    if not is_backward:
        return moved
    dense, _, routed = layer_elements(arch)
    held = dense / trainer.tensor + routed / trainer.expert
    return 2 * moved + (2 * GRADIENT * held if trainer.trains_all else 0)


def _communication(trainer: Trainer, tokens: float) -> dict[str, float]:
    arch, hardware = trainer.arch, trainer.hardware
    tensor, context = trainer.tensor, trainer.context
    on_rank, row = tokens / context, P * arch.hidden_size
    if trainer.kernel in OF_CHOSEN_KEYS:
        width: float = arch.kv_lora_rank + arch.qk_rope_head_dim
    else:
        heads = arch.num_attention_heads if arch.kv_lora_rank else arch.num_key_value_heads
        width = max(heads / tensor, 1) * head_widths(arch)
    attends = num_attention_layers(arch) / arch.num_hidden_layers
    gathered = attends * P * tokens * width * (context - 1) / context
    # A delta net's heads are exchanged for tokens and back.
    values = arch.linear_num_value_heads * arch.linear_value_head_dim
    exchanged = P * on_rank / tensor * (delta_net_channels(arch) + 2 * values)
    gathered += (1 - attends) * exchanged * (context - 1) / context
    copies = on_rank / tensor * (2 if arch.n_routed_experts else 0)
    sent = attainable.dispatch_seconds(hardware, trainer.expert, arch.num_experts_per_tok, row) if copies else 0.0
    return {
        "TP collectives": 4 * on_rank * row * (tensor - 1) / tensor / attainable.link(hardware, tensor),
        "CP collectives": gathered / attainable.link(hardware, tensor * context),
        "EP dispatch": copies * sent,
    }


def _messages(trainer: Trainer, tokens: float) -> float:
    """Return the time of a micro-batch's rows to the next stage, and of their gradients back."""
    if trainer.num_stages == 1:
        return 0.0
    sent = P * trainer.arch.hidden_size * tokens / trainer.context / trainer.tensor
    return 2 * trainer.num_chunks * sent / attainable.link(trainer.hardware, trainer.num_gpus)


def _output(trainer: Trainer, tokens: float, passes: int) -> float:
    """Return the time of the output matrix: one pass forward, two backward."""
    arch, hardware = trainer.arch, trainer.hardware
    logits = tokens / trainer.context * arch.vocab_size / trainer.tensor
    times = passes if trainer.trains_all else min(passes, 2)
    moved = LOGIT_BYTES * logits * (1 if passes > 1 else 0.5)
    products = trainer.fitted.products * times * 2 * logits * arch.hidden_size / attainable.gemm(hardware)
    return products + moved / attainable.memory(hardware)


def _exchange(trainer: Trainer, num_layers: int, hidden_behind: float) -> float:
    """Return the time of a stage's gradients to their owners and its weights back that no pass hides."""
    if not trainer.trains_all:
        return 0.0
    dense, _, routed = layer_elements(trainer.arch)
    ranks = trainer.num_gpus // trainer.num_stages
    shards, expert_shards = ranks // trainer.tensor, ranks // trainer.expert
    held = dense / trainer.tensor * (1 - 1 / shards) + routed / trainer.expert * (1 - 1 / expert_shards)
    sent = (P + GRADIENT) * num_layers * held / attainable.link(trainer.hardware, ranks)
    return max(sent - (hidden_behind if trainer.overlaps else 0.0), 0.0)


@functools.cache
def layer_elements(arch: Architecture) -> tuple[float, float, float]:
    """Return the matrices' elements of a layer of average: outside of experts and indexer, indexer, all experts."""
    sums: Counter[str] = Counter()
    for layer in decoder_weights(arch):
        for weight in layer:
            if len(weight.shape) == 2:
                kind = weight.component if weight.component in ("indexer", "routed_experts") else "dense"
                sums[kind] += weight.num_elements
    count = arch.num_hidden_layers
    return sums["dense"] / count, sums["indexer"] / count, sums["routed_experts"] / count

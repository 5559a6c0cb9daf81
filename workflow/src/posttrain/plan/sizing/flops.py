"""Floating-point operations of a model on a sequence: useful products, without those that a kernel discards.

A multiply-add counts as two operations. For a sequence of S tokens, with N heads of width d_qk and d_v, K keys kept by
the indexer (all keys with dense attention), H_i indexer heads of width D:

    linear      2 S  sum of the matrices applied to a token; of the experts only the selected ones
    head        2 S  vocabulary hidden
    attention   2 N (d_qk + d_v)  per pair of a query and an attended key, per layer
                pairs = sum over s of min(s, K)
    indexer     2 H_i (D + 1)     per pair of a query and a visible key, per indexer: it scores all keys to keep K
                pairs = S (S + 1) / 2
    delta net   S N_l (6 D_k D_v), per layer: a head's state is read twice and updated once
                2 S (2 G_l D_k + N_l D_v) taps of the convolution

The backward pass costs twice the forward pass for parts with a gradient, which excludes the frozen indexer. Full
recomputation repeats the forward pass of the layers, not of the head.

Sources: 2 and 4 operations per parameter and token, Kaplan et al., arXiv 2001.08361, section 2.1; recomputation,
Korthikanti et al., arXiv 2205.05198, appendix A; the sparse attention's two parts, DeepSeek-V3.2 technical report,
arXiv 2512.02556, section 2.1. Norms, rotary embedding, softmax and the router's top-k are not counted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from posttrain.config.families import num_attention_layers, num_indexers
from posttrain.config.schema import Architecture
from posttrain.plan.sizing.model_size import Weight, decoder_weights


@dataclass(frozen=True)
class Flops:
    """Operations of the forward pass.

    Args:
        linear: Trained matrices of the layers.
        frozen: The indexer's matrices.
        head: The output matrix.
        attention: Attention over the keys kept.
        indexer: Scores of all keys.
        delta_net: States of gated delta nets, and their convolutions.
    """

    linear: float
    frozen: float
    head: float
    attention: float
    indexer: float
    delta_net: float = 0.0

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.linear + self.frozen + self.head + self.attention + self.indexer + self.delta_net

    @property
    def backward(self) -> float:
        """One backward pass, without recomputation."""
        return 2 * (self.linear + self.head + self.attention + self.delta_net)

    def training(self, recompute: bool) -> float:
        """Forward and backward pass, optionally with full recomputation."""
        return self.forward + self.backward + (self.forward - self.head if recompute else 0.0)


def sequence_flops(arch: Architecture, num_tokens: float) -> Flops:
    """Return the operations on one causal sequence.

    Args:
        arch: The model.
        num_tokens: Length S.

    Example:
        GLM-5 on 32,768 tokens, in billions per token: 81.7 in matrices, 10.1 in attention, 10.5 in the indexer's
        scores; dense attention would need 83.8.
    """
    layers = num_attention_layers(arch)
    trained, frozen = _matrix_elements(arch)
    kept = _pairs(num_tokens, arch.index_topk if arch.index_n_heads else num_tokens)
    return Flops(
        linear=2 * num_tokens * trained,
        frozen=2 * num_tokens * frozen,
        head=2 * num_tokens * arch.vocab_size * arch.hidden_size,
        attention=2 * layers * arch.num_attention_heads * head_widths(arch) * kept,
        indexer=2
        * num_indexers(arch)
        * arch.index_n_heads
        * (arch.index_head_dim + 1)
        * _pairs(num_tokens, num_tokens),
        delta_net=num_tokens * (arch.num_hidden_layers - layers) * delta_net_flops(arch),
    )


def delta_net_flops(arch: Architecture) -> int:
    """Return the operations of a token in a gated delta net, without its matrices."""
    keys, values = arch.linear_key_head_dim, arch.linear_num_value_heads * arch.linear_value_head_dim
    return 6 * keys * values + 2 * delta_net_channels(arch) * arch.linear_conv_kernel_dim


def delta_net_channels(arch: Architecture) -> int:
    """Return the width of queries, keys and values of a gated delta net, which its convolution passes."""
    keys = 2 * arch.linear_num_key_heads * arch.linear_key_head_dim
    return keys + arch.linear_num_value_heads * arch.linear_value_head_dim


def _pairs(num_tokens: float, kept: float) -> float:
    """Return the sum over s = 1 ... S of min(s, K)."""
    grown = min(num_tokens, kept)
    return grown * (grown + 1) / 2 + (num_tokens - grown) * kept


def head_widths(arch: Architecture) -> int:
    """Return d_qk + d_v."""
    if arch.kv_lora_rank:
        return arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim
    return 2 * arch.head_dim


@functools.cache
def _matrix_elements(arch: Architecture) -> tuple[float, float]:
    """Return the number of elements of the layers' matrices that are applied to a token: (trained, frozen)."""
    trained = frozen = 0.0
    for layer in decoder_weights(arch):
        for weight in layer:
            if len(weight.shape) == 2:
                elements = weight.num_elements * _share(arch, weight)
                trained, frozen = (
                    (trained, frozen + elements) if weight.component == "indexer" else (trained + elements, frozen)
                )
    return trained, frozen


def _share(arch: Architecture, weight: Weight) -> float:
    """Return the share of a weight that is applied to a token."""
    return arch.num_experts_per_tok / arch.n_routed_experts if weight.component == "routed_experts" else 1.0

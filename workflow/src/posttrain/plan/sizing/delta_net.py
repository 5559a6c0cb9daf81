"""Memory of a gated delta net for one micro-batch on one rank.

Letters: t tokens of the row and s = t / TP; p bytes of a weight; on this rank C channels of queries, keys and values,
V = N_l D_v widths of values, N_l value heads, W = C + V + 2 N_l the joined projection.

    kept for the backward pass    p t W of the projection, p t C of the convolution, p t V of the rule's output and of
                                  the gated norm's, 12 N_l t of rates and decays
      in torch                    a state 4 N_l D_k D_v of each 8 chunks of 64 tokens
      of fla-core's kernels       p t 64 N_l of the products inside chunks
    a forward pass alone          p t W, p t C, the values copied to be contiguous, the gate likewise, the rule's output
                                  and what is normed, p t V each; inside the gated norm 16 t V in FP32; or inside the
                                  rule normed queries and keys, the state's keys N_l D_k, three times V, products of a
                                  chunk 64 (4 + p) N_l, and the states
    differentiated, besides       inside the gated norm 32 t V in FP32; or inside the rule a state p N_l D_k D_v of each
                                  chunk and its gradient, and those of W, C and V

Under context parallelism a rank has all tokens of its share of the heads, so its bytes are the same.

Source: `rl/megatron_backend/gated_delta_net` (`chunks.py` keeps the states); fla-core 0.6.0, `ops/gated_delta_rule`.
The terms of fla-core's kernels are read from its code; they are not rehearsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from posttrain.config.schema import Architecture
from posttrain.plan.sizing.flops import delta_net_channels
from posttrain.plan.sizing.model_size import Weight

FP32 = 4
CHUNK, CHUNKS_PER_STATE = 64, 8


class Tokens(Protocol):
    """A micro-batch on a rank: `activations.Row`."""

    p: int
    tp: int
    t: int


def is_delta_net(weights: Iterable[Weight]) -> bool:
    """Return whether a layer with these weights is a gated delta net."""
    return any(weight.component == "delta_net" for weight in weights)


class DeltaNet:
    """The terms of the module's table.

    Args:
        arch: The model.
        row: The micro-batch.
    """

    def __init__(self, arch: Architecture, row: Tokens):
        self._row, self._heads = row, arch.linear_num_value_heads / row.tp
        self._channels, self._values = delta_net_channels(arch) / row.tp, self._heads * arch.linear_value_head_dim
        self._joined = self._channels + self._values + 2 * self._heads
        self._keys = self._heads * arch.linear_key_head_dim
        self._state = self._heads * arch.linear_key_head_dim * arch.linear_value_head_dim

    def kept_in_torch(self) -> float:
        """Return what a layer keeps without kernels."""
        return self._kept() + FP32 * self._state * self._row.t / (CHUNK * CHUNKS_PER_STATE)

    def kept(self) -> float:
        """Return what a layer keeps with fla-core's kernels."""
        return self._kept() + self._row.p * self._row.t * CHUNK * self._heads

    def forward(self) -> float:
        """Return what a pass holds that keeps nothing, where it is most: inside the gated norm or the rule."""
        row, given = self._row, self._joined + self._channels
        inside_norm = row.p * row.t * (given + 4 * self._values) + 4 * FP32 * row.t * self._values
        widths = given + self._channels - self._values + self._keys + 3 * self._values
        inside_rule = row.p * row.t * widths + (row.p + FP32) * row.t * CHUNK * self._heads + self._states()
        return max(inside_norm, inside_rule)

    def gradients(self) -> float:
        """Return what the backward pass holds besides what was kept."""
        widths = self._joined + self._channels + self._values
        inside_rule = self._row.p * self._row.t * widths + 2 * self._states()
        return max(inside_rule, 8 * FP32 * self._row.t * self._values)

    def _kept(self) -> float:
        row = self._row
        return row.p * row.t * (self._joined + self._channels + 2 * self._values) + 3 * FP32 * row.t * self._heads

    def _states(self) -> float:
        return self._row.p * self._state * self._row.t / CHUNK

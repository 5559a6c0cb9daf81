"""What attention puts on an NVIDIA GPU: a part of the table in `activations_cuda`, whose letters these are.

Besides, P tokens of the row in blocks of equally long sequences, S the longest, b = P S heads the pairs of a query and
a key; R width of MLA's latents, K keys that a query attends to; p bytes of a weight, 2 or 4.

    kept                     p t (q + k + v + o), with norms of queries and keys p t (2 q + 2 k + v + o), 4 t heads;
                             where keys are selected masks, p t o of the output put together, 4 p t rope, latents
                             before and after their norms, and v and o in blocks as wide as k; in the latents' space
                             p t (q + o + heads (2 R + rope)) and 4 t K of places
    differentiated, besides  where ranks share a row of T, p (T (4 (k + v) + k) + 3 t q): all ranks' keys and values (as
                             wide as keys), their gradients of both halves of this rank's queries, and the sums
    keys being selected      8 (indexer's heads) + 5 B a pair that is scored, at least 20; 4 B of four times as many by
                             kernels; without what is kept of the output; in the latents' space with the indexer's
                             queries and head weights of s, and the places of their keys, 2 s K (4 s K of sequences over
                             32,768 tokens)
    a forward pass           p t (q + k + v) of the matrix, p t (q + k) turned and as many of their norms, p t (v + o),
                             4 t heads and p s H; without latents; where ranks share a row of T, p (3 t o + T (k + v)),
                             the outputs of both halves of this rank's queries, once more in full, and all ranks' keys;
                             or its last matrix: p t H, of which ranks that cut it keep p s H, for p t v and 4 t heads;
                             of latents p t (q + k + v) as matrices make them, and as they are put together, and p s H

In FP32 Transformer Engine has no fused attention. There are 3 p P q of queries, keys and values, all as wide, and a
mask of P S bytes. The backward pass finds p t o and two numbers of each pair (4 b) besides, and makes two more to
differentiate them, with p t v for p t o; a forward pass takes three, or two and p (P + t) o, and of latents
p t (2 q + k + v) before.

Source: as of `activations_cuda`; `pytorch/attention/dot_product_attention/backends.py` and `softmax.py` for FP32.
"""

from __future__ import annotations

from posttrain.config.families import family_of
from posttrain.config.schema import Architecture
from posttrain.plan.flags.indexer_kernel import CHUNKS_AT_ONCE
from posttrain.plan.sizing.activations import Row
from posttrain.plan.sizing.delta_net import DeltaNet, is_delta_net
from posttrain.plan.sizing.model_size import Weight

FP32 = 4
# Of a pair of a query and a key: its score and whether the key is seen; what it takes to choose by scores.
SCORE_BYTES, CHOICE_BYTES = 5, 20
# Of a pair, where kernels choose: its score.
FUSED_BYTES = 4

Layer = tuple[Weight, ...]


class Attention:
    """The terms of the module's table for one micro-batch on one rank.

    Args:
        arch: Of the model.
        row: The micro-batch.
        longest: Tokens of its longest sequence.
        has_kernel: Keys that are chosen are attended to in the latents' space.
        is_indexer_fused: Kernels choose them.
    """

    def __init__(self, arch: Architecture, row: Row, longest: int, has_kernel: bool, is_indexer_fused: bool = False):
        self._arch, self._row, self._p = arch, row, row.p
        heads_at_once = 2 * FP32 * arch.index_n_heads + SCORE_BYTES
        self._pair_bytes = CHUNKS_AT_ONCE * FUSED_BYTES if is_indexer_fused else max(heads_at_once, CHOICE_BYTES)
        self._in_latents = has_kernel and row.is_selected()
        self._is_unfused = row.p == FP32 and not arch.index_n_heads
        self._pairs = row.padded * longest
        self._key_width = arch.kv_lora_rank + arch.qk_rope_head_dim
        self._delta_net = DeltaNet(arch, row)
        self._thin, self._wide = (row.p * tokens * row.hidden for tokens in (row.s, row.t))

    def kept(self, layer: Layer) -> float:
        """Return the bytes that its backward pass finds."""
        row, arch = self._row, self._arch
        if is_delta_net(layer):
            return self._delta_net.kept()
        query, key_value, output = row.widths(layer)
        statistics = FP32 * row.heads() * row.t
        if not arch.kv_lora_rank:
            before_norms = query + key_value / 2 if self._has_norms() else 0.0
            # The gate, the output before it, and the gate's sigmoid.
            before_norms += 3 * output * row.gated()
            if self._is_unfused:
                return self._p * row.t * (before_norms + output) + self._unfused(query, 2)
            return self._p * row.t * (before_norms + query + key_value + output) + statistics
        latents = self._p * row.s * (arch.q_lora_rank + arch.kv_lora_rank)
        if self._in_latents:
            attended = query + output + (row.heads() + 1) * self._key_width + row.heads() * arch.kv_lora_rank
            return self._p * row.t * attended + latents + statistics + FP32 * row.t * arch.index_topk
        if self._is_unfused:
            return self._p * row.t * output + latents + self._unfused(query, 2)
        if not arch.index_n_heads:
            return self._in_blocks(layer)
        # Ours keeps latents before their norms, values and outputs as wide as keys, and the output put together again.
        wider = max(0.0, key_value - 2 * output) * (row.padded + row.padded_keys)
        return self._in_blocks(layer) + latents + self._p * (wider + row.t * (output + 4 * arch.qk_rope_head_dim))

    def dropped(self, layer: Layer) -> float:
        """Return what of `kept` the up-projections make, which their recomputation drops."""
        row, arch = self._row, self._arch
        if not arch.kv_lora_rank or self._is_unfused:
            return 0.0
        query, key_value, output = row.widths(layer)
        if self._in_latents:
            return self._p * row.t * (query + output + row.heads() * self._key_width)
        return 0.0 if arch.index_n_heads else self._p * (row.padded * query + row.padded_keys * (key_value - output))

    def copied(self, layer: Layer) -> float:
        """Return what exists twice while recomputed queries are given to the core's backward pass."""
        if self._in_latents:
            return self._p * self._row.t * self._row.heads() * self._key_width
        query, key_value, _ = self._row.widths(layer)
        return self._p * self._row.t * (query + key_value)

    def _in_blocks(self, layer: Layer) -> float:
        """Return the bytes of latents, and of queries, keys, values and output in blocks, with their masks."""
        row, arch = self._row, self._arch
        query, key_value, output = row.widths(layer)
        latents = self._p * row.s * (arch.q_lora_rank + arch.kv_lora_rank)
        blocks = self._p * (row.padded * (query + output) + row.padded_keys * key_value)
        return blocks + latents + FP32 * row.heads() * row.t + row.mask_bytes

    def choosing(self, layer: Layer, is_backward: bool) -> float:
        """Return what attention holds while keys are chosen; 0 where a layer does not choose."""
        row, arch = self._row, self._arch
        if not row.is_selected() or not any(weight.component == "indexer" for weight in layer):
            return 0.0
        pairs = self._pair_bytes * row.scored_pairs()
        if not self._in_latents:
            return pairs + self._in_blocks(layer)
        expanded = row.widths(layer)[0] if is_backward else 0.0
        queries = row.t * (expanded + (row.heads() + 1) * self._key_width)
        dealt = row.s * arch.index_n_heads * (self._p * arch.index_head_dim + FP32)
        return pairs + self._p * queries + dealt + row.choice()

    def forward(self, layer: Layer) -> float:
        """Return what attention holds while it is computed and nothing is kept; 0 where latents are attended to."""
        row, arch = self._row, self._arch
        if is_delta_net(layer):
            return self._delta_net.forward() + self._thin
        query, key_value, output = row.widths(layer)
        if self._in_latents:
            return 0.0
        attends = max(self._unfused(query, 3), self._unfused(query, 2) + self._p * (row.padded + row.t) * output)
        if arch.kv_lora_rank:
            latents = row.s * (arch.q_lora_rank + arch.kv_lora_rank)
            if self._is_unfused:
                return self._p * (row.t * (2 * query + key_value) + latents) + attends + self._thin
            return self._p * (2 * row.t * (query + key_value) + latents) + self._thin
        turned = query + key_value / 2
        normed = turned if self._has_norms() else 0.0
        gate = 2 * output * row.gated()
        own = self._p * row.t * (query + key_value + turned + normed + output + gate)
        if self._is_unfused:
            return own + self._p * row.t * (key_value / 2 - output) + attends + self._thin
        shared = 3 * row.t * output + row.keys * key_value if row.t != row.keys else 0.0
        attended = own + self._p * (row.t * key_value / 2 + shared) + FP32 * row.heads() * row.t
        projected = own + self._wide + self._thin * (row.tp > 1)
        return max(attended, projected) + self._thin

    def _has_norms(self) -> bool:
        """Return whether queries and keys have norms."""
        return self._arch.use_qk_norm or family_of(self._arch).always_qk_norm

    def _unfused(self, query: float, num_scores: int) -> float:
        """Return what Transformer Engine's unfused attention holds with so many numbers of each pair."""
        return 3 * self._p * self._row.padded * query + (num_scores * FP32 * self._row.heads() + 1) * self._pairs

    def gradients(self, layer: Layer) -> float:
        """Return what Transformer Engine takes besides to differentiate attention, alone or to other ranks' keys."""
        row, arch = self._row, self._arch
        if is_delta_net(layer):
            return self._delta_net.gradients()
        query, key_value, output = row.widths(layer)
        if self._is_unfused:
            value = output if arch.kv_lora_rank else key_value / 2
            return self._p * row.t * (value - output) + 2 * FP32 * row.heads() * self._pairs
        if row.t == row.keys or arch.index_n_heads:
            return 0.0
        key = value = query if arch.kv_lora_rank else key_value / 2
        return self._p * (row.keys * (4 * (key + value) + key) + 3 * row.t * query)

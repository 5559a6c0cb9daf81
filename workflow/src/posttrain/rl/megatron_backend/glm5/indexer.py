"""The DSA indexer as a Megatron module: it decides which keys each query attends to.

Its parameters are replicated over tensor-parallel ranks and frozen: only the selection of keys reaches the loss, so
there is no gradient, and weight decay must not shrink untrained parameters.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

from posttrain.rl.megatron_backend.arguments import INDEXER_NORM_EPS
from posttrain.rl.megatron_backend.glm5.linear import FrozenLinear
from posttrain.rl.megatron_backend.glm5.sparse_attention import Selector, causal_mask, index_scores, select_topk
from posttrain.rl.megatron_backend.packed import PackedSequences


class Indexer(MegatronModule):
    """Scores keys with its own small heads and keeps the best `dsa_indexer_topk`.

    Args:
        config: Megatron's configuration with the `dsa_indexer_*` fields set.
    """

    def __init__(self, config: MLATransformerConfig):
        super().__init__(config=config)
        self.num_heads = config.dsa_indexer_n_heads
        self.head_dim = config.dsa_indexer_head_dim
        self.topk = config.dsa_indexer_topk
        self.is_interleaved = config.dsa_indexer_rope_interleaved
        dtype = config.params_dtype
        self.linear_wq_b = FrozenLinear(config.q_lora_rank, self.num_heads * self.head_dim, dtype)
        self.linear_wk = FrozenLinear(config.hidden_size, self.head_dim, dtype)
        self.linear_weights_proj = FrozenLinear(config.hidden_size, self.num_heads, dtype)
        self.k_norm = torch.nn.LayerNorm(self.head_dim, eps=INDEXER_NORM_EPS, dtype=dtype)
        self.k_norm.requires_grad_(False)

    @torch.no_grad()
    def make_selectors(
        self, x: torch.Tensor, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sequences: PackedSequences
    ) -> list[Selector]:
        """Project once, and return for each block a function that selects keys for a chunk of queries.

        Args:
            x: [T, H] normalised input of the attention.
            q_latent: [T, q_lora_rank], the query latent after its norm: the indexer's query comes from the same vector
                as the attention's.
            cos: [T, rope / 2] of each token's position.
            sin: [T, rope / 2].
            sequences: How the row is packed.
        """
        queries = self._rotate(self.linear_wq_b(q_latent).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)
        keys = self._rotate(self.k_norm(self.linear_wk(x)).unsqueeze(1), cos, sin).squeeze(1)
        # Compute the head weights in fp32, as the reference does, because they decide between close scores.
        weights = F.linear(x.float(), self.linear_weights_proj.weight.float()) * self.num_heads**-0.5
        by_block = sequences.queries.split(queries), sequences.gather_keys(keys), sequences.queries.split(weights)
        return [partial(self._select, *block) for block in zip(*by_block, strict=True)]

    @torch.no_grad()
    def _select(
        self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        visible = causal_mask(first, end - first, end, keys.device)
        before = keys.shape[1] - queries.shape[1]
        chunk = slice(first - before, end - before)
        scores = index_scores(queries[:, chunk], keys[:, :end], weights[:, chunk])
        return select_topk(scores, visible, self.topk)

    def _rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding to the first part of each head [T, n, head_dim]: interleaved (GLM-5) or in halves."""
        width = 2 * cos.shape[-1]
        rotary, plain = heads[..., :width], heads[..., width:]
        pairs = (rotary[..., 0::2], rotary[..., 1::2]) if self.is_interleaved else rotary.chunk(2, dim=-1)
        (real, imaginary), cos, sin = pairs, cos.unsqueeze(1).to(heads.dtype), sin.unsqueeze(1).to(heads.dtype)
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin, plain], dim=-1)


def gather_sequence(t: torch.Tensor, config: MLATransformerConfig) -> torch.Tensor:
    """Gather all tokens of a tensor that sequence parallelism may have split; without gradient."""
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(t.detach(), tensor_parallel_output_grad=False)
    return t.detach()

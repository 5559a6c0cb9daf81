"""The DSA indexer as a Megatron module: it decides which keys each query attends to.

Its parameters are replicated over tensor-parallel ranks and frozen: only the selection of keys reaches the loss, so
there is no gradient, and weight decay must not shrink untrained parameters. The ranks share the work: each chooses for
the queries that are dealt to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

from posttrain.plan.flags.indexer_kernel import CHUNKS_AT_ONCE, FUSED
from posttrain.rl.megatron_backend.arguments import INDEXER_NORM_EPS
from posttrain.rl.megatron_backend.glm5.choice import choose_in_chunks, choose_in_torch, places_dtype
from posttrain.rl.megatron_backend.glm5.dealing import deal, gather_shards
from posttrain.rl.megatron_backend.glm5.fused_indexer import choose_in_kernels
from posttrain.rl.megatron_backend.glm5.linear import FrozenLinear
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
        is_fused = config.indexer_kernel == FUSED
        self.choose_chunk = choose_in_kernels if is_fused else choose_in_torch
        self.chunk_tokens = config.attention_chunk_tokens * (CHUNKS_AT_ONCE if is_fused else 1)
        dtype = config.params_dtype
        self.linear_wq_b = FrozenLinear(config.q_lora_rank, self.num_heads * self.head_dim, dtype)
        self.linear_wk = FrozenLinear(config.hidden_size, self.head_dim, dtype)
        self.linear_weights_proj = FrozenLinear(config.hidden_size, self.num_heads, dtype)
        self.k_norm = torch.nn.LayerNorm(self.head_dim, eps=INDEXER_NORM_EPS, dtype=dtype)
        self.k_norm.requires_grad_(False)

    @torch.no_grad()
    def choose(
        self, x: torch.Tensor, q_latent: torch.Tensor, frequencies: torch.Tensor, sequences: PackedSequences
    ) -> torch.Tensor:
        """Choose the keys of the queries that are dealt to this tensor-parallel rank; collective.

        Each rank projects its own tokens' keys and head weights, and the latents of the queries that it scores.

        Args:
            x: [T / n, H] normalised input of the attention; n ranks share the row by sequence parallelism.
            q_latent: [T / n, q_lora_rank], the query latent after its norm: the indexer's query comes from the same
                vector as the attention's.
            frequencies: [S, rope / 2] rotary angles by position.
            sequences: How the row is packed.

        Returns:
            [T / n, K] places of the keys, in the order of `dealing.deal`; see `choice`.
        """
        turn, num_ranks = sequences.turn
        assert num_ranks == 1 or self.config.sequence_parallel, "ranks that all have the whole row need no dealing"
        # Compute the head weights in fp32, as the reference does, because they decide between close scores.
        weights = F.linear(x.float(), self.linear_weights_proj.weight.float()) * self.num_heads**-0.5
        own, dealt = sequences.position_ids.unflatten(0, (num_ranks, -1))[turn], sequences.position_ids[turn::num_ranks]
        keys = self._rotate(self.k_norm(self.linear_wk(x)).unsqueeze(1), frequencies[own]).squeeze(1)
        queries = self.linear_wq_b(deal(q_latent, num_ranks)).unflatten(-1, (self.num_heads, self.head_dim))
        queries = self._rotate(queries, frequencies[dealt])
        rows = queries, deal(weights, num_ranks), dealt
        return self._choose(rows, gather_shards(keys, num_ranks), sequences)

    def _choose(self, rows: tuple[torch.Tensor, ...], keys: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
        """Choose block by block, from queries, head weights and positions by dealt token, and the row's keys."""
        by_block = zip(*map(sequences.dealt.split, rows), sequences.gather_keys(keys), strict=True)
        dtype = places_dtype(sequences.max_seqlen_q)
        chosen = []
        for (queries, weights, positions, seen), (_, longest) in zip(by_block, sequences.queries.blocks, strict=True):
            span = seen.shape[1] - longest, sequences.turn[1]
            given = queries, weights, positions, seen
            chosen.append(choose_in_chunks(*given, *span, self.topk, self.chunk_tokens, dtype, self.choose_chunk))
        return sequences.dealt.join(chosen)

    def _rotate(self, heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate the first part of each head [T, n, head_dim], interleaved (GLM-5) or in halves, by [T, rope / 2]."""
        width = 2 * angles.shape[-1]
        rotary, plain = heads[..., :width], heads[..., width:]
        pairs = (rotary[..., 0::2], rotary[..., 1::2]) if self.is_interleaved else rotary.chunk(2, dim=-1)
        real, imaginary = pairs
        cos, sin = (part.unsqueeze(1).to(heads.dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin, plain], dim=-1)

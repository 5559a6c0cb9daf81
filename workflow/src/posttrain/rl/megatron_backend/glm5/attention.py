"""GLM-5's attention for Megatron Core: MLA with DSA, on packed sequences.

Megatron's `MLASelfAttention` builds the projections and computes query, key, value and the normalised query latent. We
replace the core attention (selected keys, packed rows), and feed the indexer the latent *after* its norm, as in the
pre-trained model. On GPUs, long rows attend in latent space, with a Megatron kernel that reads only the selected keys
(`latent_space`).

Context parallelism gathers the keys and values of one layer. A ring would avoid that, but it merges partial softmaxes
and so rounds differently for each number of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer.experimental_attention_variant.dsa import source_dsa_compute_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

from posttrain.rl.megatron_backend.glm5.dealing import gather_dealt
from posttrain.rl.megatron_backend.glm5.indexer import Indexer
from posttrain.rl.megatron_backend.glm5.latent_space import (
    latent_query,
    latent_values,
    places_in_row,
    query_latent_and_key,
    up_projections,
)
from posttrain.rl.megatron_backend.glm5.sparse_attention import attend_in_chunks
from posttrain.rl.megatron_backend.latent_attention import LatentAttention
from posttrain.rl.megatron_backend.packed import PackedSequences
from posttrain.rl.megatron_backend.recomputation import DroppedOutputs
from posttrain.rl.megatron_backend.sparse_kernels import load_kernel


class SparseCoreAttention(MegatronModule):
    """Attention over the keys that the indexer selects, separately for each sequence of the packed row.

    Args:
        config: Megatron's configuration.
        softmax_scale: Factor on the dot products.
        layer_number: From 1; a layer without an indexer reuses the keys that an earlier layer selected.
    """

    def __init__(self, config: MLATransformerConfig, softmax_scale: float, layer_number: int, **_: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        frequency, offset = config.dsa_indexer_topk_freq, config.dsa_indexer_skip_topk_offset
        self.chooser = source_dsa_compute_layer(layer_number, offset, frequency)
        self.indexer = Indexer(config) if self.chooser == layer_number else None
        self.is_shared = frequency > 1
        self.keeps_choice = config.keep_index_choice == "all"
        self.kernel = load_kernel(config)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        sequences: PackedSequences,
        frequencies: torch.Tensor,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, N, D_qk], N heads of this rank; only its own tokens under context parallelism.
            key: [T, N, D_qk].
            value: [T, N, D_v].
            x: [T or T / TP, 1, H] input of the attention, split under sequence parallelism.
            q_latent: [T or T / TP, q_lora_rank] after its norm.
            sequences: How the row is packed.
            frequencies: [S, rope / 2] rotary angles by position.

        Returns:
            [T, N * D_v].
        """
        places = self._places(x, q_latent, sequences, frequencies)
        by_block = [None] * len(sequences.spans) if places is None else sequences.queries.split(places)
        topk, chunk = self.config.dsa_indexer_topk, self.config.attention_chunk_tokens
        blocks = zip(sequences.queries.split(query), *map(sequences.gather_keys, (key, value)), by_block, strict=True)
        outputs = [attend_in_chunks(q, k, v, chosen, topk, self.softmax_scale, chunk) for q, k, v, chosen in blocks]
        return sequences.queries.join(outputs).flatten(1)

    def serves_latents(self, sequences: PackedSequences) -> bool:
        """Return whether a row uses latent space; it does not if every query sees all keys before it."""
        return self.kernel is not None and sequences.max_seqlen_q > self.config.dsa_indexer_topk

    def attend_to_latents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        sequences: PackedSequences,
        frequencies: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to the selected latents; arguments as in `forward`, but query [T, N, R + rope] and key [T, R + rope].

        Returns:
            [T, N, R] with R = kv_lora_rank.
        """
        assert self.kernel is not None, "asked only where there is one"
        places = self._places(x, q_latent, sequences, frequencies)
        assert places is not None, "asked only where there is a choice"
        chunk = self.config.attention_chunk_tokens
        places = places_in_row(places, sequences.first_keys(), sequences.order, chunk)
        return self.kernel(query, sequences.gather_row(key), places, self.softmax_scale, self.config.kv_lora_rank)

    def _places(
        self, x: torch.Tensor, q_latent: torch.Tensor, sequences: PackedSequences, frequencies: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the places [T, K] of the keys that each query attends to; None for all before it. Collective."""
        if sequences.max_seqlen_q <= self.config.dsa_indexer_topk:
            return None
        choice = sequences.choices.get(self.chooser)
        if choice is None:
            assert self.indexer is not None, f"layer {self.chooser} has not chosen keys before"
            choice = self.indexer.choose(x.squeeze(1), q_latent, frequencies, sequences)
            if self.is_shared or (self.keeps_choice and is_computed_again(sequences)):
                sequences.choices[self.chooser] = choice
        elif not self.is_shared:  # this is the recomputation, the only reader
            del sequences.choices[self.chooser]
        return gather_dealt(choice, sequences.turn[1])


def is_computed_again(sequences: PackedSequences) -> bool:
    """Return whether a recomputation follows: a checkpointed layer runs first without gradients."""
    return sequences.is_differentiated and not torch.is_grad_enabled()


class Glm5SelfAttention(LatentAttention):
    """MLA whose core attention sees the layer's input and the normalised query latent."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to a packed row.

        Args:
            hidden_states: [T or T / TP, 1, H].
            attention_mask: Must be None: causality inside each sequence is implied.
            packed_seq_params: How the row is packed.
            unused: Other arguments that Megatron's layer passes; must be None.

        Returns:
            [T or T / TP, 1, H], and the bias (None).
        """
        asked = [name for name, argument in unused.items() if argument is not None]
        assert not asked, f"not supported by packed sparse attention: {asked}"
        assert attention_mask is None, "packed sparse attention makes its own mask"
        assert isinstance(packed_seq_params, PackedSequences), "sequences must be packed"
        frequencies = self._frequencies(packed_seq_params.max_seqlen_q)
        if self.core_attention.serves_latents(packed_seq_params):
            return self._attend_to_latents(hidden_states, packed_seq_params, frequencies)
        query, key, value, q_latent, _ = self.get_query_key_value_tensors(
            hidden_states, packed_seq_params=packed_seq_params
        )
        context = self.core_attention(query, key, value, hidden_states, q_latent, packed_seq_params, frequencies)
        if self.recompute_up_proj:
            # Megatron made it with queries, keys and values.
            self.qkv_up_checkpoint.discard_output_and_register_recompute(context)  # type: ignore[has-type]
            self.qkv_up_checkpoint = None
        return self.linear_proj(context.unsqueeze(1))

    def _attend_to_latents(
        self, hidden_states: torch.Tensor, sequences: PackedSequences, frequencies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q_latent, key = query_latent_and_key(self, hidden_states, sequences)
        # As inputs, both parts of the weight have one gradient together, as in rows that attend otherwise: Megatron
        # reduces gradients once each has come as often as in the first update.
        keys_up, values_up = up_projections(self)
        queries, values = (DroppedOutputs(self.recompute_up_proj) for _ in range(2))
        query = queries.run(partial(latent_query, self, sequences), q_latent, keys_up)
        latents = self.core_attention.attend_to_latents(query, key, hidden_states, q_latent, sequences, frequencies)
        queries.drop_until_gradient_of(latents)
        value = values.run(latent_values, latents, values_up)
        output, bias = self.linear_proj(value)
        values.drop_until_gradient_of(output)
        return output, bias

    def _frequencies(self, length: int) -> torch.Tensor:
        """Return the rotary angles [length, rope / 2] by position, scaled by YaRN if configured."""
        if not isinstance(self.rotary_pos_emb, YarnRotaryEmbedding):
            return self.rotary_pos_emb.get_freqs_non_repeated(length)
        angles, _ = self.rotary_pos_emb.get_emb(length)
        return angles[:, 0, 0, : angles.shape[-1] // 2]

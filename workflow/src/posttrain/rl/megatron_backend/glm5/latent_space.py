"""Attention in MLA's latent space: all heads share one key per token, and read only the selected positions of the row.

A head's scores are q (W_k c) = (q W_k) c. With W_k absorbed into the query, the latent c with the rotary part appended
is the key of all heads, and c is their value; W_v is applied to the result. So no keys or values of [T, N, D] exist
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Shapes: T tokens of the row, N heads of this rank, R kv_lora_rank, K index_topk.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from posttrain.rl.megatron_backend.glm5.linear import await_weight
from posttrain.rl.megatron_backend.packed import PackedSequences


def query_latent_and_key(
    layer: MLASelfAttention, hidden_states: torch.Tensor, sequences: PackedSequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the query latent [T or T / TP, q_lora_rank] after its norm, and the keys [T, R + rope].

    Args:
        layer: Layer with Megatron's projections.
        hidden_states: [T or T / TP, 1, H], split under sequence parallelism.
        sequences: How the row is packed.
    """
    config = layer.config
    q_latent, combined = (part.squeeze(1) for part in layer._qkv_down_projection(hidden_states))
    kv_latent, rotary_key = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    q_latent = layer.q_layernorm(q_latent)
    key = torch.cat([layer.kv_layernorm(kv_latent), rotary_key], dim=-1)
    # Each rank has only its own heads' gradient, so the backward pass sums it over ranks.
    enter = gather_from_sequence_parallel_region if config.sequence_parallel else copy_to_tensor_model_parallel_region
    kv_latent, rotary_key = enter(key).split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    rotary_key = _rotate(layer, sequences, rotary_key.unsqueeze(1)).squeeze(1)
    return q_latent, torch.cat([kv_latent, rotary_key], dim=-1)


def latent_query(
    layer: MLASelfAttention, sequences: PackedSequences, q_latent: torch.Tensor, keys_up: torch.Tensor
) -> torch.Tensor:
    """Return the queries [T, N, R + rope] of a query latent [T or T / TP, q_lora_rank] and W_k [N, D, R]."""
    config = layer.config
    heads = layer.linear_q_up_proj(q_latent)[0].unflatten(-1, (-1, layer.q_head_dim))
    plain, rotary = heads.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
    query = torch.einsum("tnd,ndr->tnr", plain, keys_up)
    return torch.cat([query, _rotate(layer, sequences, rotary)], dim=-1)


def latent_values(latents: torch.Tensor, values_up: torch.Tensor) -> torch.Tensor:
    """Return the values [T, 1, N D_v] of attended latents [T, N, R] and W_v [N, D_v, R]."""
    return torch.einsum("tnr,nvr->tnv", latents, values_up).flatten(1).unsqueeze(1)


def up_projections(layer: MLASelfAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_k [N, D, R] and W_v [N, D_v, R] of this rank's heads."""
    await_weight(layer.linear_kv_up_proj)
    both = layer.linear_kv_up_proj.weight.unflatten(0, (layer.num_attention_heads_per_partition, -1))
    keys_up, values_up = both.split([layer.config.qk_head_dim, both.shape[1] - layer.config.qk_head_dim], dim=1)
    return keys_up, values_up


def _rotate(layer: MLASelfAttention, sequences: PackedSequences, part: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to [T, n, rope], as `MLASelfAttention` does to its expanded heads."""
    rotary, scale = layer.rotary_pos_emb, 1.0
    length = rotary.get_rotary_seq_len(None, None, part, layer.config, sequences)
    angles = rotary(length, packed_seq=True)
    if isinstance(rotary, YarnRotaryEmbedding):
        angles, scale = angles
    boundaries = sequences.cu_seqlens_q if sequences.cu_seqlens_q_padded is None else sequences.cu_seqlens_q_padded
    if layer.config.context_parallel_size == 1:
        angles = angles[: len(part)]
    named = {"cu_seqlens": boundaries, "mscale": scale, "cp_group": layer.pg_collection.cp}
    return apply_rotary_pos_emb(part, angles, layer.config, mla_rotary_interleaved=True, **named)


@torch.no_grad()
def places_in_row(
    places: torch.Tensor, first_keys: torch.Tensor, order: torch.Tensor | None, chunk_tokens: int
) -> torch.Tensor:
    """Return the positions of chosen keys in `PackedSequences.gather_row`.

    Args:
        places: [T, K], positions in each query's sequence, padded with -1.
        first_keys: [T] int64, place of the first token of the query's sequence in the row.
        order: [T of all ranks] int64, where a token of the row lies in `gather_row`; None: at its own place.
        chunk_tokens: Queries for which intermediate results exist at a time.

    Returns:
        [T, K] int32, padded with -1.
    """
    found = torch.empty(places.shape, dtype=torch.int32, device=places.device)
    chunks = zip(*(part.split(chunk_tokens) for part in (places, first_keys, found)), strict=True)
    for of_chunk, first_key, result in chunks:
        row = of_chunk + first_key[:, None]
        if order is not None:
            row = order[row]
        result.copy_(row.masked_fill_(of_chunk < 0, -1))
    return found

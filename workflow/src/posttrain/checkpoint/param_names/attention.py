"""Names of attention: with latents (MLA) and its indexer (DSA), or with grouped queries (GQA).

Megatron joins the projections of a GQA layer, group by group: N / G query heads, their key head, their value head. With
head width D,

    linear_qkv.weight  [G (N / G + 2) D, H]    group g: (N / G) D query rows, then D key rows and D value rows

and likewise the bias. One Hub tensor is therefore G blocks of rows. With an output gate (Qwen3.5), the gate's rows
follow the query's (`delta_net.gated_query`).

Letters: H hidden_size, N query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.checkpoint.param_names.delta_net import gated_query
from posttrain.checkpoint.param_names.placement import Placement, rows, whole
from posttrain.config.families import chooses_keys, family_of
from posttrain.config.schema import Architecture


def latent_attention(arch: Architecture, hf: str, key: str, layer: int) -> Iterator[Placement]:
    """Yield the placements of an MLA layer, including its indexer if it has one."""
    width, heads = arch.hidden_size, arch.num_attention_heads
    q_rank, kv_rank = arch.q_lora_rank, arch.kv_lora_rank
    rope, nope, value = arch.qk_rope_head_dim, arch.qk_nope_head_dim, arch.v_head_dim
    query: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("q_a_proj", "linear_q_down_proj", (q_rank, width)),
        ("q_a_layernorm", "q_layernorm", (q_rank,)),
        ("q_b_proj", "linear_q_up_proj", (heads * (nope + rope), q_rank)),
    )
    if not q_rank:
        query = (("q_proj", "linear_q_proj", (heads * (nope + rope), width)),)
    for hf_part, key_part, shape in (
        *query,
        ("kv_a_proj_with_mqa", "linear_kv_down_proj", (kv_rank + rope, width)),
        ("kv_a_layernorm", "kv_layernorm", (kv_rank,)),
        ("kv_b_proj", "linear_kv_up_proj", (heads * (nope + value), kv_rank)),
        ("o_proj", "linear_proj", (width, heads * value)),
    ):
        yield whole(f"{hf}{hf_part}.weight", f"{key}{key_part}.weight", shape)
    if chooses_keys(arch, layer):
        yield from _indexer(arch, f"{hf}indexer.", f"{key}core_attention.indexer.")


def _indexer(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    heads, head_dim = arch.index_n_heads, arch.index_head_dim
    for hf_part, key_part, shape in (
        ("wq_b.weight", "linear_wq_b.weight", (heads * head_dim, arch.q_lora_rank)),
        ("wk.weight", "linear_wk.weight", (head_dim, arch.hidden_size)),
        ("k_norm.weight", "k_norm.weight", (head_dim,)),
        ("k_norm.bias", "k_norm.bias", (head_dim,)),
        ("weights_proj.weight", "linear_weights_proj.weight", (heads, arch.hidden_size)),
    ):
        yield whole(f"{hf}{hf_part}", f"{key}{key_part}", shape)


def grouped_attention(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    """Yield the placements of a GQA layer."""
    width, head_dim = arch.hidden_size, arch.head_dim
    yield from _grouped_projections(arch, hf, f"{key}linear_qkv.weight", "weight", (width,))
    if arch.attention_bias:
        yield from _grouped_projections(arch, hf, f"{key}linear_qkv.bias", "bias", ())
    yield whole(f"{hf}o_proj.weight", f"{key}linear_proj.weight", (width, arch.num_attention_heads * head_dim))
    if arch.use_qk_norm or family_of(arch).always_qk_norm:
        yield whole(f"{hf}q_norm.weight", f"{key}q_layernorm.weight", (head_dim,))
        yield whole(f"{hf}k_norm.weight", f"{key}k_layernorm.weight", (head_dim,))


def _grouped_projections(
    arch: Architecture, hf: str, key: str, kind: str, columns: tuple[int, ...]
) -> Iterator[Placement]:
    groups, head_dim = arch.num_key_value_heads, arch.head_dim
    query_rows = arch.num_attention_heads // groups * head_dim
    before_keys = query_rows * (2 if family_of(arch).gated_attention else 1)
    group_rows = before_keys + 2 * head_dim
    parts = [("k_proj", before_keys, head_dim), ("v_proj", before_keys + head_dim, head_dim)]
    if family_of(arch).gated_attention:
        yield gated_query(arch, hf, key, group_rows)
    else:
        parts.insert(0, ("q_proj", 0, query_rows))
    for name, first, num_rows in parts:
        starts = tuple(range(first, groups * group_rows, group_rows))
        yield rows(f"{hf}{name}.{kind}", key, (groups * group_rows, *columns), starts, num_rows)

"""The name table in both directions, and the tensors that a checkpoint must hold.

Each decoder layer has two norms. In MLA layers they are separate modules. In GQA layers Megatron makes a norm part of
the next linear layer, whether or not one kernel computes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec
from posttrain.checkpoint.param_names.attention import grouped_attention, latent_attention
from posttrain.checkpoint.param_names.feed_forward import experts, mlp
from posttrain.checkpoint.param_names.placement import Placement, whole
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError

# ---- both directions ----


@cache
def to_megatron(arch: Architecture) -> tuple[Placement, ...]:
    """Return the placement of every tensor of the checkpoint, from first to last layer, then MTP layers."""
    width, vocab, decoder_layers = arch.hidden_size, arch.vocab_size, arch.num_hidden_layers
    table = [whole("model.embed_tokens.weight", "embedding.word_embeddings.weight", (vocab, width))]
    for i in range(decoder_layers):
        is_moe = arch.n_routed_experts > 0 and i >= arch.first_k_dense_replace
        table += _decoder_layer(arch, i, f"decoder.layers.{i}.", is_moe)
    table.append(whole("model.norm.weight", "decoder.final_layernorm.weight", (width,)))
    if not arch.tie_word_embeddings:
        table.append(whole("lm_head.weight", "output_layer.weight", (vocab, width)))
    for i in range(arch.num_nextn_predict_layers):
        table += _mtp_layer(arch, decoder_layers + i, f"mtp.layers.{i}.")
    return tuple(table)


@cache
def by_hf_name(arch: Architecture) -> Mapping[str, Placement]:
    """Return the placement of each Hub tensor by name."""
    return {placement.hf_name: placement for placement in to_megatron(arch)}


@cache
def by_key(arch: Architecture) -> Mapping[str, tuple[Placement, ...]]:
    """Return the placements in each Megatron tensor: the inverse of `to_megatron`."""
    grouped: dict[str, list[Placement]] = {}
    for placement in to_megatron(arch):
        grouped.setdefault(placement.key, []).append(placement)
    return {key: tuple(placements) for key, placements in grouped.items()}


# ---- required tensors ----


def expected_tensors(arch: Architecture) -> dict[str, TensorSpec]:
    """Return shape and dtype of every required tensor, including MTP layers."""
    return {placement.hf_name: placement.spec for placement in to_megatron(arch)}


def optional_copies(arch: Architecture) -> dict[str, str]:
    """Return the tensors that a checkpoint may duplicate -> the trained tensor with the same value.

    MTP layers may have their own embedding and output matrix; a tied output matrix may be stored explicitly.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    copies = {}
    if arch.tie_word_embeddings:
        copies[head], head = embedding, embedding
    for i in range(arch.num_nextn_predict_layers):
        prefix = f"model.layers.{arch.num_hidden_layers + i}."
        copies[f"{prefix}embed_tokens.weight"] = embedding
        copies[f"{prefix}shared_head.head.weight"] = head
    return copies


def mtp_layer_of(arch: Architecture, name: str) -> int:
    """Return the layer number in a tensor's name if it is an MTP layer, after the decoder; otherwise 0."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    layer = int(match[1]) if match else 0
    return layer if layer >= arch.num_hidden_layers else 0


def compare_tensors(arch: Architecture, found: Mapping[str, TensorSpec]) -> list[str]:
    """Compare a checkpoint's tensors with the architecture.

    Args:
        arch: Dimensions of the model.
        found: Name -> shape and dtype in the checkpoint.

    Returns:
        One line per tensor that is missing, unknown, or has another shape or dtype; empty if all match.
    """
    expected = expected_tensors(arch)
    allowed = expected | {copy: expected[original] for copy, original in optional_copies(arch).items()}
    missing = [name for name in expected if name not in found]
    lines = [f"{name}: missing, expected {expected[name]}" for name in missing]
    for name, spec in found.items():
        if name not in allowed:
            lines.append(f"{name}: unknown to the architecture, {spec}")
        elif spec != allowed[name]:
            lines.append(f"{name}: {spec}, expected {allowed[name]}")
    return lines


def require_tensors(reader: CheckpointReader, arch: Architecture) -> None:
    """Raise unless a checkpoint's tensors are exactly those of the architecture.

    Raises:
        CheckpointError: Tensors are missing, unknown, or have another shape or dtype; lists them.
    """
    lines = compare_tensors(arch, {name: info.spec for name, info in reader.infos.items()})
    if lines:
        shown = [*lines[:20], f"... and {len(lines) - 20} more"] if len(lines) > 20 else lines
        raise CheckpointError(
            "tensors-differ-from-model", f"{reader.folder}: not of this architecture:\n  " + "\n  ".join(shown)
        )


# ---- the table ----


def _decoder_layer(arch: Architecture, layer: int, key: str, is_moe: bool) -> Iterator[Placement]:
    hf, width = f"model.layers.{layer}.", (arch.hidden_size,)
    input_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    places = f"{hf}self_attn.", f"{key}self_attention."
    if arch.kv_lora_rank:
        attention = latent_attention(arch, *places, layer)
    else:
        attention = grouped_attention(arch, *places)
        input_norm = "self_attention.linear_qkv.layer_norm_weight"
        mlp_norm = mlp_norm if is_moe else "mlp.linear_fc1.layer_norm_weight"
    yield whole(f"{hf}input_layernorm.weight", f"{key}{input_norm}", width)
    yield from attention
    yield whole(f"{hf}post_attention_layernorm.weight", f"{key}{mlp_norm}", width)
    if is_moe:
        yield from experts(arch, f"{hf}mlp.", f"{key}mlp.")
    else:
        yield from mlp(arch.hidden_size, arch.intermediate_size, f"{hf}mlp.", f"{key}mlp.")


def _mtp_layer(arch: Architecture, layer: int, key: str) -> Iterator[Placement]:
    hf, width = f"model.layers.{layer}.", arch.hidden_size
    yield whole(f"{hf}enorm.weight", f"{key}enorm.weight", (width,))
    yield whole(f"{hf}hnorm.weight", f"{key}hnorm.weight", (width,))
    yield whole(f"{hf}eh_proj.weight", f"{key}eh_proj.weight", (width, 2 * width))
    yield from _decoder_layer(arch, layer, f"{key}transformer_layer.", is_moe=True)
    yield whole(f"{hf}shared_head.norm.weight", f"{key}final_layernorm.weight", (width,))

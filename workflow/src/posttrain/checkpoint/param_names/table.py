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
from posttrain.checkpoint.param_names.delta_net import delta_net
from posttrain.checkpoint.param_names.feed_forward import experts, mlp
from posttrain.checkpoint.param_names.placement import Placement, whole
from posttrain.checkpoint.param_names.vision import vision_tower
from posttrain.config.families import family_of, is_delta_net
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError

HEAD, KEY_MTP = "lm_head.weight", "mtp."

# ---- both directions ----


@cache
def to_megatron(arch: Architecture) -> tuple[Placement, ...]:
    """Return the placement of every tensor of the checkpoint, from first to last layer, then MTP layers."""
    width, vocab, decoder_layers = arch.hidden_size, arch.vocab_size, arch.num_hidden_layers
    hf = family_of(arch).text_prefix
    table = [whole(embedding_name(arch), "embedding.word_embeddings.weight", (vocab, width))]
    for i in range(decoder_layers):
        is_moe = arch.n_routed_experts > 0 and i >= arch.first_k_dense_replace
        table += _decoder_layer(arch, i, f"{hf}layers.{i}.", f"decoder.layers.{i}.", is_moe)
    table.append(whole(f"{hf}norm.weight", "decoder.final_layernorm.weight", (width,)))
    if not arch.tie_word_embeddings:
        table.append(whole(HEAD, "output_layer.weight", (vocab, width)))
    for i in range(arch.num_nextn_predict_layers):
        table += _mtp_layer(arch, decoder_layers + i, f"{KEY_MTP}layers.{i}.")
    return (*table, *vision_tower(arch))


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
    embedding, head = embedding_name(arch), HEAD
    copies = {}
    if arch.tie_word_embeddings:
        copies[head], head = embedding, embedding
    if family_of(arch).mtp_prefix:
        return copies
    for i in range(arch.num_nextn_predict_layers):
        prefix = f"model.layers.{arch.num_hidden_layers + i}."
        copies[f"{prefix}embed_tokens.weight"] = embedding
        copies[f"{prefix}shared_head.head.weight"] = head
    return copies


def mtp_layer_of(arch: Architecture, name: str) -> int:
    """Return the layer number of a tensor of an MTP layer, which follow the decoder's; otherwise 0."""
    if (prefix := family_of(arch).mtp_prefix) and name.startswith(prefix):
        match = re.match(re.escape(prefix) + r"layers\.(\d+)\.", name)
        return arch.num_hidden_layers + (int(match[1]) if match else 0)
    match = re.match(re.escape(family_of(arch).text_prefix) + r"layers\.(\d+)\.", name)
    layer = int(match[1]) if match else 0
    return layer if layer >= arch.num_hidden_layers else 0


def embedding_name(arch: Architecture) -> str:
    """Return the Hub name of the embedding."""
    return f"{family_of(arch).text_prefix}embed_tokens.weight"


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


def _decoder_layer(arch: Architecture, layer: int, hf: str, key: str, is_moe: bool) -> Iterator[Placement]:
    width = (arch.hidden_size,)
    input_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    places = f"{hf}self_attn.", f"{key}self_attention."
    if arch.kv_lora_rank:
        attention = latent_attention(arch, *places, layer)
    else:
        mlp_norm = mlp_norm if is_moe else "mlp.linear_fc1.layer_norm_weight"
        if is_delta_net(arch, layer):
            attention = delta_net(arch, f"{hf}linear_attn.", places[1])
            input_norm = "self_attention.in_proj.layer_norm_weight"
        else:
            attention = grouped_attention(arch, *places)
            input_norm = "self_attention.linear_qkv.layer_norm_weight"
    yield whole(f"{hf}input_layernorm.weight", f"{key}{input_norm}", width)
    yield from attention
    yield whole(f"{hf}post_attention_layernorm.weight", f"{key}{mlp_norm}", width)
    if is_moe:
        yield from experts(arch, f"{hf}mlp.", f"{key}mlp.")
    else:
        yield from mlp(arch.hidden_size, arch.intermediate_size, f"{hf}mlp.", f"{key}mlp.")


def _mtp_layer(arch: Architecture, layer: int, key: str) -> Iterator[Placement]:
    """Yield an MTP layer: among the decoder's on the Hub, or apart and with other names (Qwen3.5)."""
    width, inner = arch.hidden_size, f"{key}transformer_layer."
    if apart := family_of(arch).mtp_prefix:
        hf = f"{apart}layers.{layer - arch.num_hidden_layers}."
        names = [f"{apart}{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")]
    else:
        hf = f"{family_of(arch).text_prefix}layers.{layer}."
        names = [f"{hf}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
    yield whole(names[0], f"{key}enorm.weight", (width,))
    yield whole(names[1], f"{key}hnorm.weight", (width,))
    yield whole(names[2], f"{key}eh_proj.weight", (width, 2 * width))
    yield from _decoder_layer(arch, layer, hf, inner, is_moe=arch.n_routed_experts > 0)
    yield whole(names[3], f"{key}final_layernorm.weight", (width,))

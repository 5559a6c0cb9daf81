"""The one table of parameter names: the Hub's on one side, Megatron's on the other.

Each tensor of the Hub is one rectangular chunk of one of Megatron's tensors. Most are the whole of it.
Megatron joins two kinds: the gate and up projections of an MLP are the upper and lower rows of `linear_fc1`,
and the experts of a layer are stacked along a first dimension of their own:

    mlp.experts.experts.linear_fc1.weight  [E, 2F, H]    expert e: gate_proj at [e, 0:F, :], up_proj at [e, F:2F, :]
    mlp.experts.experts.linear_fc2.weight  [E, H, F]     expert e: down_proj at [e, :, :]

(The second `experts` is Megatron's: its name for the stack inside the module of that name.)

Everything follows from `config.schema.Architecture`; no weights are needed. Conversion, export, weight sync
and the check of a downloaded checkpoint all read this table.

Letters: H hidden_size, F the width of an MLP, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from posttrain.checkpoint.safetensors_io import CheckpointReader, TensorSpec
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where a tensor of the Hub lies in Megatron's tensor.

    Args:
        hf_name: Name on the Hub.
        key: Name in Megatron's distributed checkpoint.
        dtype: Precision on the Hub, "BF16" or "F32".
        global_shape: Dimensions of Megatron's whole tensor.
        offsets: First index of the chunk in each dimension.
        sizes: Extent of the chunk in each dimension.
    """

    hf_name: str
    key: str
    dtype: str
    global_shape: Shape
    offsets: Shape
    sizes: Shape

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype on the Hub: the chunk without the dimension that stacks experts."""
        return TensorSpec(self.sizes[1:] if len(self.sizes) == 3 else self.sizes, self.dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor on the Hub."""
        return self.spec.size_bytes


# ---- both directions ----


@cache
def to_megatron(arch: Architecture) -> tuple[Placement, ...]:
    """Return the placement of every tensor of the checkpoint, first layer to last, MTP layers after."""
    width, vocab, decoder_layers = arch.hidden_size, arch.vocab_size, arch.num_hidden_layers
    rows = [_whole("model.embed_tokens.weight", "embedding.word_embeddings.weight", (vocab, width))]
    for i in range(decoder_layers):
        is_moe = i >= arch.first_k_dense_replace
        rows += _decoder_layer(arch, f"model.layers.{i}.", f"decoder.layers.{i}.", is_moe)
    rows.append(_whole("model.norm.weight", "decoder.final_layernorm.weight", (width,)))
    rows.append(_whole("lm_head.weight", "output_layer.weight", (vocab, width)))
    for i in range(arch.num_nextn_predict_layers):
        rows += _mtp_layer(arch, f"model.layers.{decoder_layers + i}.", f"mtp.layers.{i}.")
    return tuple(rows)


@cache
def by_hf_name(arch: Architecture) -> Mapping[str, Placement]:
    """Return the placement of each tensor of the Hub."""
    return {placement.hf_name: placement for placement in to_megatron(arch)}


@cache
def by_key(arch: Architecture) -> Mapping[str, tuple[Placement, ...]]:
    """Return what each of Megatron's tensors is made of: the inverse of `to_megatron`."""
    grouped: dict[str, list[Placement]] = {}
    for placement in to_megatron(arch):
        grouped.setdefault(placement.key, []).append(placement)
    return {key: tuple(placements) for key, placements in grouped.items()}


# ---- what a checkpoint must hold ----


def expected_tensors(arch: Architecture) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor that a checkpoint must have, MTP layers included."""
    return {placement.hf_name: placement.spec for placement in to_megatron(arch)}


def optional_copies(arch: Architecture) -> dict[str, str]:
    """Return the tensors that a checkpoint may repeat in its MTP layers -> what each is a copy of."""
    copies = {}
    for i in range(arch.num_nextn_predict_layers):
        prefix = f"model.layers.{arch.num_hidden_layers + i}."
        copies[f"{prefix}embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"{prefix}shared_head.head.weight"] = "lm_head.weight"
    return copies


def compare_tensors(arch: Architecture, found: Mapping[str, TensorSpec]) -> list[str]:
    """Compare the tensors of a checkpoint with what the architecture needs.

    Args:
        arch: Dimensions of the model.
        found: Name -> shape and dtype of what is there.

    Returns:
        One line per tensor that is missing, unknown, or of another shape or dtype; empty when all is well.
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
    """Refuse a checkpoint whose tensors are not exactly those of the architecture.

    Raises:
        CheckpointError: Listing the tensors that are missing, unknown, or of another shape or dtype.
    """
    lines = compare_tensors(arch, {name: info.spec for name, info in reader.infos.items()})
    if lines:
        shown = [*lines[:20], f"... and {len(lines) - 20} more"] if len(lines) > 20 else lines
        raise CheckpointError(f"{reader.folder}: not of this architecture:\n  " + "\n  ".join(shown))


# ---- the table ----


def _decoder_layer(arch: Architecture, hf: str, key: str, is_moe: bool) -> Iterator[Placement]:
    width = (arch.hidden_size,)
    yield _whole(f"{hf}input_layernorm.weight", f"{key}input_layernorm.weight", width)
    yield from _attention(arch, f"{hf}self_attn.", f"{key}self_attention.")
    if arch.index_n_heads:
        yield from _indexer(arch, f"{hf}self_attn.indexer.", f"{key}self_attention.core_attention.indexer.")
    yield _whole(f"{hf}post_attention_layernorm.weight", f"{key}pre_mlp_layernorm.weight", width)
    if is_moe:
        yield from _moe(arch, f"{hf}mlp.", f"{key}mlp.")
    else:
        yield from _mlp(arch.hidden_size, arch.intermediate_size, f"{hf}mlp.", f"{key}mlp.")


def _attention(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    width, heads = arch.hidden_size, arch.num_attention_heads
    q_rank, kv_rank = arch.q_lora_rank, arch.kv_lora_rank
    rope, nope, value = arch.qk_rope_head_dim, arch.qk_nope_head_dim, arch.v_head_dim
    for hf_part, key_part, shape in (
        ("q_a_proj", "linear_q_down_proj", (q_rank, width)),
        ("q_a_layernorm", "q_layernorm", (q_rank,)),
        ("q_b_proj", "linear_q_up_proj", (heads * (nope + rope), q_rank)),
        ("kv_a_proj_with_mqa", "linear_kv_down_proj", (kv_rank + rope, width)),
        ("kv_a_layernorm", "kv_layernorm", (kv_rank,)),
        ("kv_b_proj", "linear_kv_up_proj", (heads * (nope + value), kv_rank)),
        ("o_proj", "linear_proj", (width, heads * value)),
    ):
        yield _whole(f"{hf}{hf_part}.weight", f"{key}{key_part}.weight", shape)


def _indexer(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    heads, head_dim = arch.index_n_heads, arch.index_head_dim
    for hf_part, key_part, shape in (
        ("wq_b.weight", "linear_wq_b.weight", (heads * head_dim, arch.q_lora_rank)),
        ("wk.weight", "linear_wk.weight", (head_dim, arch.hidden_size)),
        ("k_norm.weight", "k_norm.weight", (head_dim,)),
        ("k_norm.bias", "k_norm.bias", (head_dim,)),
        ("weights_proj.weight", "linear_weights_proj.weight", (heads, arch.hidden_size)),
    ):
        yield _whole(f"{hf}{hf_part}", f"{key}{key_part}", shape)


def _mlp(width: int, inner: int, hf: str, key: str) -> Iterator[Placement]:
    fc1 = f"{key}linear_fc1.weight", "BF16", (2 * inner, width)
    yield Placement(f"{hf}gate_proj.weight", *fc1, (0, 0), (inner, width))
    yield Placement(f"{hf}up_proj.weight", *fc1, (inner, 0), (inner, width))
    yield _whole(f"{hf}down_proj.weight", f"{key}linear_fc2.weight", (width, inner))


def _moe(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    experts, width, inner = arch.n_routed_experts, arch.hidden_size, arch.moe_intermediate_size
    yield _whole(f"{hf}gate.weight", f"{key}router.weight", (experts, width))
    yield _whole(f"{hf}gate.e_score_correction_bias", f"{key}router.expert_bias", (experts,), "F32")
    fc1 = f"{key}experts.experts.linear_fc1.weight", "BF16", (experts, 2 * inner, width)
    fc2 = f"{key}experts.experts.linear_fc2.weight", "BF16", (experts, width, inner)
    for e in range(experts):
        yield Placement(f"{hf}experts.{e}.gate_proj.weight", *fc1, (e, 0, 0), (1, inner, width))
        yield Placement(f"{hf}experts.{e}.up_proj.weight", *fc1, (e, inner, 0), (1, inner, width))
        yield Placement(f"{hf}experts.{e}.down_proj.weight", *fc2, (e, 0, 0), (1, width, inner))
    if arch.n_shared_experts:
        shared = arch.n_shared_experts * inner
        yield from _mlp(width, shared, f"{hf}shared_experts.", f"{key}shared_experts.")


def _mtp_layer(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    width = arch.hidden_size
    yield _whole(f"{hf}enorm.weight", f"{key}enorm.weight", (width,))
    yield _whole(f"{hf}hnorm.weight", f"{key}hnorm.weight", (width,))
    yield _whole(f"{hf}eh_proj.weight", f"{key}eh_proj.weight", (width, 2 * width))
    yield from _decoder_layer(arch, hf, f"{key}transformer_layer.", is_moe=True)
    yield _whole(f"{hf}shared_head.norm.weight", f"{key}final_layernorm.weight", (width,))


def _whole(hf_name: str, key: str, shape: Shape, dtype: str = "BF16") -> Placement:
    return Placement(hf_name, key, dtype, shape, (0,) * len(shape), shape)

"""The tensors that are quantised, by Hub name, for every format and for weight sync."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.errors import CheckpointError

# Quantised are the matrices of attention, indexer, delta net and every kind of MLP. Engines compute with the others in
# BF16 or FP32: embedding, lm_head, norms, routers and gates, the indexer's weights_proj, a delta net's in_proj_a and
# in_proj_b (one row per head), a vision tower, and the projection of the MTP layer.
_QUANTIZED = {
    "attention": r"self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|q_proj|k_proj|v_proj|o_proj)",
    "delta_net": r"linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)",
    "indexer": r"self_attn\.indexer\.(?:wq_b|wk)",
    "dense_mlp": r"mlp\.(?:gate_proj|up_proj|down_proj)",
    "experts": r"mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)",
    "shared_experts": r"mlp\.shared_experts?\.(?:gate_proj|up_proj|down_proj)",
}
CLASSES = tuple(_QUANTIZED)
_DECODER, _MTP = r"model\.(?:language_model\.)?", "mtp."
_PATTERNS = {
    kind: re.compile(rf"(?:{_DECODER}|{re.escape(_MTP)})layers\.\d+\.{part}\.weight")
    for kind, part in _QUANTIZED.items()
}
_LAYER = re.compile(rf"{_DECODER}layers\.(\d+)\.")
# Matrices with the same input, which engines fuse into one.
_FUSED = (
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z"),
)


def tensor_class(hf_name: str) -> str:
    """Return one of `CLASSES`, or "unquantized"."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(hf_name)), "unquantized")


def layer_of(hf_name: str) -> int | None:
    """Return the layer number of a tensor; None for tensors outside layers, such as the embedding.

    MTP layers are numbered after the decoder's, or apart from them (Qwen3.5: "mtp.layers.0."), which gives None.
    """
    match = _LAYER.match(hf_name)
    return int(match[1]) if match else None


def is_mtp(hf_name: str, num_layers: int) -> bool:
    """Return whether a tensor belongs to an MTP layer of a model with so many decoder layers; 0: unknown."""
    return hf_name.startswith(_MTP) or (layer_of(hf_name) or 0) >= num_layers > 0


def fused_with(hf_name: str) -> tuple[str, ...]:
    """Return the tensors that an engine fuses with a tensor, including itself.

    Example:
        "...experts.7.up_proj.weight" gives the names of gate_proj and up_proj of expert 7; down_proj is not fused.
    """
    before, _, projection = hf_name.removesuffix(".weight").rpartition(".")
    for group in _FUSED:
        if projection in group:
            return tuple(f"{before}.{member}.weight" for member in group)
    return (hf_name,)


@dataclass(frozen=True)
class Selection:
    """Selects the tensors to quantise.

    Args:
        classes: Classes that a format covers, of `CLASSES`.
        num_layers: Number of decoder layers; the MTP layers follow them.
        keep_first_layers: Leading decoder layers that keep their precision.
        keep_last_layers: Trailing decoder layers that keep their precision.
        keep_modules: Regular expressions; a module with a match in its name keeps its precision.
        mtp: Whether the MTP layers are quantised.
    """

    classes: Collection[str] = CLASSES
    num_layers: int = 0
    keep_first_layers: int = 0
    keep_last_layers: int = 0
    keep_modules: Sequence[str] = ()
    mtp: bool = True

    def includes(self, hf_name: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor is quantised."""
        if len(shape) != 2 or tensor_class(hf_name) not in self.classes:
            return False
        return not self._keeps_layer(hf_name) and not any(re.search(p, hf_name) for p in self.keep_modules)

    def _keeps_layer(self, hf_name: str) -> bool:
        if is_mtp(hf_name, self.num_layers):
            return not self.mtp
        layer = layer_of(hf_name)
        assert layer is not None, hf_name
        if layer < self.keep_first_layers:
            return True
        return bool(self.keep_last_layers) and layer >= self.num_layers - self.keep_last_layers

    def check(self, specs: Mapping[str, TensorSpec]) -> None:
        """Check that tensors which an engine fuses are all quantised or all not.

        Args:
            specs: Name -> shape and dtype of all source tensors.

        Raises:
            CheckpointError: Nothing is quantised, or a group is split; names a tensor of either kind.
        """
        groups: dict[str, dict[bool, str]] = {}
        for name, spec in specs.items():
            if tensor_class(name) in self.classes:
                groups.setdefault(_computed_as_one(name), {})[self.includes(name, spec.shape)] = name
        if not any(True in sides for sides in groups.values()):
            raise CheckpointError(
                "nothing-to-quantize", f"none of the {len(specs)} tensors is on the list of what is quantised"
            )
        for sides in groups.values():
            if len(sides) == 2:
                raise CheckpointError(
                    "fused-tensors-kept-apart",
                    f"quantize.keep_modules: {sides[False]} keeps its precision and {sides[True]} does not, but "
                    "engines compute them as one: keep both or none",
                )


def _computed_as_one(hf_name: str) -> str:
    """Return a name common to all tensors of one engine operation: a layer's experts, or fused matrices."""
    if ".experts." in hf_name:
        return hf_name.partition(".experts.")[0]
    return fused_with(hf_name)[0]


def unquantized_modules(specs: Mapping[str, TensorSpec], selection: Selection) -> list[str]:
    """Return the modules with an unquantised matrix, in the order of their tensors."""
    matrices = ((name, spec.shape) for name, spec in specs.items() if len(spec.shape) == 2)
    return [name.removesuffix(".weight") for name, shape in matrices if not selection.includes(name, shape)]

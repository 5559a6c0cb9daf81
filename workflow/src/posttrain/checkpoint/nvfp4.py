"""NVFP4: four bits per weight for the routed experts, in the layout that NVIDIA Model Optimizer exports.

E2M1 has a sign, two bits of exponent and one of fraction; its eight magnitudes are

    code       0    1    2    3    4    5    6    7        + 8 for the negative ones
    magnitude  0   0.5   1   1.5   2    3    4    6

Sixteen neighbours of a row share a scale in E4M3, and all scales of a matrix share one in FP32:

    weight_scale_2 = amax(matrix) / (6 * 448)               FP32; makes the largest group's scale 448
    weight_scale   = e4m3(amax(group) / 6 / weight_scale_2)
    code           = e2m1(w / (weight_scale * weight_scale_2))
    w              = code * weight_scale * weight_scale_2

The group's scale is rounded before the weights are divided by it, so that codes fit the scale that is
stored; after rounding down, the largest weight may exceed 6 of it and is cut off there. A group whose scale
rounds to zero has zeros for codes. gate_proj and up_proj of an expert are one matrix to an engine, so they
share `weight_scale_2`. Two codes lie in a byte, the one with the even column in the low half.

Per weight: 4 bits + 8/16 bits of scale. What is not here: calibrated activation scales (`input_scale`),
which need a forward pass over data; engines that find none use 1 or quantise activations per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain import __version__
from posttrain.checkpoint.fp8 import E4M3_MAX, SMALLEST_SCALE
from posttrain.checkpoint.safetensors_io import TensorSpec
from posttrain.errors import CheckpointError

GROUP = 16
E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway between neighbours; a number exactly there goes to the neighbour with the even code.
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")


# ---- what is quantised ----


@dataclass(frozen=True)
class Layers:
    """Which layers a model has.

    Args:
        num_dense: Leading layers with a dense MLP.
        num_decoder: Decoder layers, the dense ones included.
        num_mtp: MTP layers, which follow.
    """

    num_dense: int
    num_decoder: int
    num_mtp: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Layers:
        """Read them from config.json.

        Raises:
            CheckpointError: When a key is missing.
        """
        keys = ("first_k_dense_replace", "num_hidden_layers", "num_nextn_predict_layers")
        if missing := [key for key in keys if not isinstance(config.get(key), int)]:
            raise CheckpointError(f"config.json: no number for {missing}; not a mixture of experts of this family")
        return cls(*(config[key] for key in keys))


def is_quantized(hf_name: str, layers: Layers) -> bool:
    """Tell whether a tensor is a routed expert of a decoder layer; engines keep the MTP layer in BF16."""
    match = _EXPERT.fullmatch(hf_name)
    return match is not None and int(match[1]) < layers.num_decoder


def partners(hf_name: str) -> tuple[str, ...]:
    """Return the tensors that share `weight_scale_2` with an expert's tensor, itself included."""
    if hf_name.endswith(".down_proj.weight"):
        return (hf_name,)
    base = re.sub(r"(gate|up)_proj\.weight$", "", hf_name)
    return (f"{base}gate_proj.weight", f"{base}up_proj.weight")


def served_specs(hf_name: str, spec: TensorSpec, layers: Layers) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of what is stored for a tensor of the Hub.

    Raises:
        CheckpointError: When an expert's row is not a whole number of groups.
    """
    if not is_quantized(hf_name, layers):
        return {hf_name: spec}
    rows, columns = spec.shape
    if columns % GROUP:
        raise CheckpointError(f"{hf_name}: rows of {columns} weights, NVFP4 needs a multiple of {GROUP}")
    return {
        hf_name: TensorSpec((rows, columns // 2), "U8"),
        f"{hf_name}_scale": TensorSpec((rows, columns // GROUP), "F8_E4M3"),
        f"{hf_name}_scale_2": TensorSpec((), "F32"),
    }


def hf_quant_config(layers: Layers) -> dict[str, Any]:
    """Return the content of hf_quant_config.json: everything but the routed experts is excluded."""
    return {
        "producer": {"name": "posttrain", "version": __version__},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP,
            "exclude_modules": excluded_modules(layers),
        },
    }


def excluded_modules(layers: Layers) -> list[str]:
    """Return patterns of the modules that stay in BF16."""
    dense = [f"model.layers.{layer}.mlp*" for layer in range(layers.num_dense)]
    mtp = [f"model.layers.{layers.num_decoder + i}*" for i in range(layers.num_mtp)]
    every_layer = [
        "model.layers.*.self_attn*",
        "model.layers.*.mlp.gate",
        "model.layers.*.mlp.shared_experts*",
    ]
    return ["lm_head", "model.embed_tokens", *every_layer, *dense, *mtp]


# ---- the maths: weights [N, K], K a multiple of 16 ----


def global_scale(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the `weight_scale_2` that matrices share, [] float32; 1 when all are zero.

    Args:
        weights: Name -> [N, K] of any float dtype.

    Raises:
        CheckpointError: When a weight is NaN or infinite, with its name.
    """
    largest = {name: weight.float().abs().amax() for name, weight in weights.items()}
    if wrong := [name for name, amax in largest.items() if not torch.isfinite(amax)]:
        raise CheckpointError(f"{wrong[0]}: holds NaN or infinity; weights must be finite to be quantised")
    amax = torch.stack(list(largest.values())).amax()
    scale_2 = (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale_2), scale_2)


def group_scale(weight: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return `weight_scale` [N, K/16] float8_e4m3fn."""
    amax = _groups(weight).abs().amax(dim=2)
    return (amax / E2M1_MAX / scale_2).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def encode(weight: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return the codes of a matrix, two per byte.

    Args:
        weight: [N, K] of any float dtype.
        scale: [N, K/16] float8_e4m3fn.
        scale_2: [] float32.

    Returns:
        [N, K/2] uint8.

    Example:
        Codes 1 and 15 (0.5 and -6) become the byte 0xf1.
    """
    step = (scale.float() * scale_2)[:, :, None]
    scaled = torch.where(step > 0, _groups(weight) / step, torch.zeros_like(step))
    codes = _round_to_e2m1(scaled).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def decode(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return the weights [N, K] float32 that codes [N, K/2] and scales stand for."""
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    magnitudes = torch.tensor(_MAGNITUDES)[(codes & 7).long()]
    values = torch.where(codes >= 8, -magnitudes, magnitudes).unflatten(1, (-1, GROUP))
    return (values * (scale.float() * scale_2)[:, :, None]).flatten(1)


def _groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().unflatten(1, (-1, GROUP))


def _round_to_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 15; beyond 6 is 6."""
    magnitude = scaled.abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for lower_code, halfway in enumerate(_HALFWAY):
        goes_up = magnitude > halfway if lower_code % 2 == 0 else magnitude >= halfway
        codes += goes_up.to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) << 3)

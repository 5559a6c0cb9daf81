"""NVFP4: four bits per weight for the routed experts, in the layout that NVIDIA Model Optimizer exports.

E2M1 has a sign, two bits of exponent and one of fraction; its eight magnitudes are

    code       0    1    2    3    4    5    6    7        + 8 for the negative ones
    magnitude  0   0.5   1   1.5   2    3    4    6

A group of sixteen neighbours in a row has a scale in E4M3, and all scales of a matrix share one in FP32:

    weight_scale_2 = amax(matrix) / (6 * 448)               FP32; makes the largest group's scale 448
    weight_scale   = e4m3(amax(group) / (6 * weight_scale_2))
    code           = e2m1(w / (weight_scale * weight_scale_2))
    w              = code * weight_scale * weight_scale_2

The group's scale is rounded before the weights are divided by it, so that codes match the stored scale; if it was
rounded down, the largest weight may exceed 6 and is clamped. A scale is at least 2^-9, E4M3's smallest number; a group
of zeros has scale 1. Engines fuse gate_proj and up_proj of an expert, so they share `weight_scale_2`. A byte holds two
codes, the one of the even column in the low half.

Activations are quantised during serving, in the same two levels; `input_scale` is their `weight_scale_2`. Calibration
files (`checkpoint.quantization.calibration`) provide it, and optionally the amax of the weights. Without them it is 1:
activations up to 2688 are in range, and groups below 6 * 2^-9 = 0.012 underflow. Experts without calibration samples
use the largest amax of their layer.

Size per weight: 4 bits + 8/16 bits of scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from posttrain import __version__
from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.calibration import Calibration
from posttrain.checkpoint.quantization.fp8 import E4M3_MAX, SMALLEST_SCALE, divide, row_slabs
from posttrain.checkpoint.quantization.quantized_names import Selection, fused_with, layer_of, tensor_class
from posttrain.errors import CheckpointError

# Group size of the format; the constants below are those of E2M1 and E4M3's smallest scale (see above).
GROUP = 16
E2M1_MAX = 6.0
SMALLEST_GROUP_SCALE = 2.0**-9
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_SUFFIX, GLOBAL_SCALE_SUFFIX, INPUT_SCALE = "_scale", "_scale_2", "input_scale"
QUANT_CONFIG_NAME = "hf_quant_config.json"
# Parts of a checkpoint outside the decoder, which stay in BF16.
_BF16_PARTS = ("model.visual.", "mtp.")


@dataclass(frozen=True)
class Nvfp4Format:
    """NVFP4 expert format of engines.

    Args:
        selection: Tensors to quantise.
        calibration: Maxima of activations and weights.
        names: All source tensors, to find the other experts of a layer.
    """

    selection: Selection
    calibration: Calibration = field(default_factory=Calibration)
    names: tuple[str, ...] = ()

    def sharing_scale(self, hf_name: str) -> tuple[str, ...]:
        """Return the tensors whose joint maximum determines `weight_scale_2`."""
        return fused_with(hf_name)

    def served_specs(self, hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of the output of `quantize`, without computing it.

        Raises:
            CheckpointError: An expert's row length is not a multiple of the group size.
        """
        rows, columns = spec.shape
        if columns % GROUP:
            raise CheckpointError(
                "rows-not-in-groups", f"{hf_name}: rows of {columns} weights, NVFP4 needs a multiple of {GROUP}"
            )
        return {
            hf_name: TensorSpec((rows, columns // 2), "U8"),
            hf_name + SCALE_SUFFIX: TensorSpec((rows, columns // GROUP), "F8_E4M3"),
            hf_name + GLOBAL_SCALE_SUFFIX: TensorSpec((), "F32"),
            input_scale_name(hf_name): TensorSpec((), "F32"),
        }

    def quantize(self, hf_name: str, weight: torch.Tensor, shared_amax: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return codes and scales of a matrix under the engines' names.

        Args:
            hf_name: Hub name.
            weight: [N, K] of any float dtype.
            shared_amax: Largest magnitude over all tensors of `sharing_scale`.

        Raises:
            CheckpointError: A weight is NaN or infinite.
        """
        assert shared_amax is not None
        given = self.calibration.weight_amax(fused_with(hf_name))
        scale_2 = global_scale(shared_amax, hf_name, given)
        packed, scale = quantize(weight, scale_2)
        return {
            hf_name: packed,
            hf_name + SCALE_SUFFIX: scale,
            hf_name + GLOBAL_SCALE_SUFFIX: scale_2,
            input_scale_name(hf_name): self._input_scale(hf_name),
        }

    def _input_scale(self, hf_name: str) -> torch.Tensor:
        if not self.calibration:
            return torch.tensor(1.0)
        amax = self.calibration.input_amax(fused_with(hf_name))
        if amax is None:
            amax = self.calibration.input_amax(_same_place_in_layer(hf_name, self.names))
        if amax is None:
            raise CheckpointError(
                "expert-not-calibrated", f"{hf_name}: no calibration file has the input of any expert of its layer"
            )
        return divide(amax, E2M1_MAX * E4M3_MAX)

    def quantization_config(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        excluded = excluded_modules(specs, self.selection)
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": GROUP, "ignore": excluded}

    def other_files(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return hf_quant_config.json, which older loaders read."""
        quantization = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP,
            "exclude_modules": excluded_modules(specs, self.selection),
        }
        producer = {"name": "posttrain", "version": __version__}
        return {QUANT_CONFIG_NAME: {"producer": producer, "quantization": quantization}}


def input_scale_name(hf_name: str) -> str:
    """Return the name of the scale of a module's input."""
    return hf_name.removesuffix("weight") + INPUT_SCALE


def _same_place_in_layer(hf_name: str, names: Iterable[str]) -> list[str]:
    """Return the tensors in the position of `hf_name` in all experts of its layer."""
    before, _, after = hf_name.partition(".experts.")
    place = re.compile(rf"{re.escape(before)}\.experts\.\d+\.{re.escape(after.partition('.')[2])}")
    return [name for name in names if place.fullmatch(name)]


def excluded_modules(specs: Iterable[str], selection: Selection) -> list[str]:
    """Return patterns of the modules that stay in BF16: all but the quantised experts."""
    names = [*specs]
    experts = [name for name in names if tensor_class(name) == "experts"]
    kept = _layers_of(name for name in experts if not selection.includes(name, (1, 1)))
    mtp = {layer for layer in _layers_of(names) if layer >= selection.num_layers}
    dense = _layers_of(name for name in names if tensor_class(name) == "dense_mlp")
    (text,) = {name.partition("layers.")[0] for name in names if layer_of(name) is not None}
    modules = ["self_attn*", "mlp.gate", "mlp.shared_experts*"]
    if any(".linear_attn." in name for name in names):
        modules = ["self_attn*", "linear_attn*", "mlp.gate", "mlp.shared_expert*"]
    return [
        *("lm_head", f"{text}embed_tokens", *(f"{text}layers.*.{module}" for module in modules)),
        *(f"{text}layers.{layer}.mlp*" for layer in sorted(dense)),
        *(f"{text}layers.{layer}.mlp.experts*" for layer in sorted(kept - mtp)),
        *(f"{text}layers.{layer}*" for layer in sorted(mtp)),
        *(f"{part}*" for part in _BF16_PARTS if any(name.startswith(part) for name in names)),
    ]


def _layers_of(hf_names: Iterable[str]) -> set[int]:
    return {layer for name in hf_names if (layer := layer_of(name)) is not None}


# ---- the maths: weights [N, K], K a multiple of 16 ----


def global_scale(amax: torch.Tensor, name: str = "weight", given: torch.Tensor | None = None) -> torch.Tensor:
    """Return the `weight_scale_2` of matrices, [] float32; 1 if all are zero.

    Args:
        amax: Their largest magnitude.
        name: Name for the error about an amax that is not finite.
        given: Overrides `amax`; larger weights are clamped.

    Raises:
        CheckpointError: A weight is NaN or infinite.
    """
    if not torch.isfinite(amax):
        raise CheckpointError(
            "values-not-finite", f"{name}: holds NaN or infinity; weights must be finite to be quantised"
        )
    amax = amax if given is None else given.to(amax.device)
    scale_2 = divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scale_2), scale_2)


def quantize(weight: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, K/2] uint8 and `weight_scale` [N, K/16] float8_e4m3fn of a matrix [N, K]."""
    num_rows, num_columns = weight.shape
    packed = torch.empty((num_rows, num_columns // 2), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((num_rows, num_columns // GROUP), dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in row_slabs(weight):
        values = weight[rows].float()
        scale[rows] = group_scale(values, scale_2)
        packed[rows] = encode(values, scale[rows], scale_2)
    return packed, scale


def group_scale(weight: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return `weight_scale` [N, K/16] float8_e4m3fn."""
    amax = F.max_pool1d(weight.float().abs(), GROUP)
    scale = (amax / (E2M1_MAX * scale_2)).clamp(SMALLEST_GROUP_SCALE, E4M3_MAX)
    return torch.where(amax == 0, torch.ones_like(scale), scale).to(torch.float8_e4m3fn)


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
    scaled = (weight.float().unflatten(1, (-1, GROUP)) / (scale.float() * scale_2)[:, :, None]).flatten(1)
    # View each pair of codes as one 16-bit number with the even column in its low byte.
    pairs = _round_to_e2m1(scaled).view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def decode(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return the weights [N, K] float32 of codes [N, K/2] and scales."""
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    signed = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=packed.device)
    return (signed[codes.long()].unflatten(1, (-1, GROUP)) * (scale.float() * scale_2)[:, :, None]).flatten(1)


def _round_to_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Return codes 0 to 15, uint8; ties go to the even code, and magnitudes above 6 become 6.

    The code is a concave, piecewise linear function of the magnitude m: 2m up to 2, m + 2 up to 4, m/2 + 4 up to 6. It
    is therefore the minimum of the three lines, each rounded separately.
    """
    m = scaled.abs()
    steps_of_half = (m * 2).round_()
    steps_of_one = m.round().add_(2)
    steps_of_two = (m / 2).round_().add_(4)
    codes = torch.minimum(steps_of_half, steps_of_one, out=steps_of_half)
    codes = torch.minimum(codes, steps_of_two, out=codes).clamp_(max=7).to(torch.int8)
    signs = (scaled.view(torch.int32) >> 28 & 8).to(torch.int8)
    return codes.bitwise_or_(signs).view(torch.uint8)

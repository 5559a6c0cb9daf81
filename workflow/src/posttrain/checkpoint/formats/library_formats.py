"""MXFP8 and INT4 for serving, quantised by the compressed-tensors library in its own layout.

MXFP8: E4M3 codes, and per 32 neighbours of a row one power of two, stored as its exponent plus 127 (E8M0). INT4: codes
-8 to 7 for the routed experts, and per 128 neighbours of a row one BF16 scale; eight codes are packed into 32 bits.
Both round to nearest, without calibration.

The library is optional: `pip install posttrain[formats]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.fp8 import row_slabs
from posttrain.checkpoint.quantization.quantized_names import Selection, unquantized_modules
from posttrain.errors import CheckpointError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

# Our name -> the library's preset, its format, and the number of weights per scale.
_PRESETS = {"mxfp8": ("MXFP8", "mxfp8-quantized", 32), "int4": ("W4A16", "pack-quantized", 128)}
# From here on, a group's scale would be 2^128, which cannot be stored: the library stores zeros.
MXFP8_LIMIT = 1.75 * 2.0**127
# Names of a matrix's tensors in the library, after the module's name.
PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"


@dataclass(frozen=True)
class LibraryFormat:
    """A format that compressed-tensors quantises to.

    Args:
        name: "mxfp8" or "int4".
        selection: The tensors to quantise.
    """

    name: str
    selection: Selection

    @property
    def group(self) -> int:
        """Number of neighbours in a row that share a scale."""
        return _PRESETS[self.name][2]

    def sharing_scale(self, hf_name: str) -> tuple[str, ...]:
        """Return (), because scales belong to groups."""
        return ()

    def served_specs(self, hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of the result of `quantize`, without data.

        Raises:
            CheckpointError: A row is not a whole number of groups.
        """
        rows, columns = spec.shape
        if columns % self.group:
            raise CheckpointError(
                "rows-not-in-groups",
                f"{hf_name}: rows of {columns} weights, {self.name} needs a multiple of {self.group}",
            )
        scale = TensorSpec((rows, columns // self.group), "U8" if self.name == "mxfp8" else "BF16")
        if self.name == "mxfp8":
            made = {"weight": TensorSpec(spec.shape, "F8_E4M3"), SCALE: scale}
        else:
            made = {PACKED: TensorSpec((rows, columns // 8), "I32"), SCALE: scale, SHAPE: TensorSpec((2,), "I64")}
        return {hf_name.removesuffix("weight") + part: spec for part, spec in made.items()}

    def quantize(
        self, hf_name: str, weight: torch.Tensor, shared_amax: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return codes and scales of a matrix under the names that engines load.

        Args:
            hf_name: Name on the Hub.
            weight: [N, K] of any float dtype.
            shared_amax: Unused.

        Raises:
            CheckpointError: A weight is NaN, infinite or too large for the format.
        """
        slabs = [self._quantize_rows(hf_name, weight[rows]) for rows in row_slabs(weight)]
        made = {part: torch.cat([slab[part] for slab in slabs]) for part in slabs[0] if part != SHAPE}
        if SHAPE in slabs[0]:
            made[SHAPE] = torch.tensor(weight.shape)
        return {hf_name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in made.items()}

    def _quantize_rows(self, hf_name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        groups = weight.float().unflatten(1, (-1, self.group))
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        if not (torch.isfinite(low) & torch.isfinite(high)).all():
            raise CheckpointError(
                "values-not-finite", f"{hf_name}: holds NaN or infinity; weights must be finite to be quantised"
            )
        if self.name == "mxfp8" and (largest := max(-low.amin().item(), high.amax().item())) >= MXFP8_LIMIT:
            raise CheckpointError(
                "value-too-large", f"{hf_name}: holds {largest:g}; MXFP8 has no scale from {MXFP8_LIMIT:g} on"
            )
        arguments = _scheme(self.name).weights
        # Scales are rounded to the stored precision before codes are computed with them.
        scale, zero_point = calculate_qparams(low, high, arguments)
        if self.name == "int4":
            scale = scale.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
        compressor = BaseCompressor.get_value_from_registry(_PRESETS[self.name][1])
        state = {"weight": weight.float(), SCALE: scale.float(), "weight_zero_point": zero_point}
        made = compressor.compress(state, _scheme(self.name))
        made.pop("weight_zero_point", None)
        return made | ({SCALE: scale} if self.name == "int4" else {})

    def quantization_config(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        scheme = _scheme(self.name).model_dump(mode="json", exclude_none=True)
        return {
            "quant_method": "compressed-tensors",
            "format": _PRESETS[self.name][1],
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**scheme, "targets": ["Linear"]}},
            "ignore": unquantized_modules(specs, self.selection),
        }

    def other_files(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return an empty dict: the folder needs no further files."""
        return {}


def decompress(config: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights [N, K] float32 of a module's compressed tensors.

    Args:
        config: The checkpoint's `quantization_config`.
        parts: "weight_packed" and others -> tensor.

    Raises:
        CheckpointError: The library is not installed.
    """
    _require_library()
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = next(iter(config["config_groups"].values()))
    compressor = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    state = {**parts, SCALE: parts[SCALE].float() if parts[SCALE].is_floating_point() else parts[SCALE]}
    return compressor.decompress(state, QuantizationScheme.model_validate(group))["weight"].float()


def _scheme(name: str) -> QuantizationScheme:
    _require_library()
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme(_PRESETS[name][0], targets=["Linear"])


def _require_library() -> None:
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            "library-missing", "this format needs compressed-tensors: pip install posttrain[formats]"
        ) from error

"""Reads a quantised checkpoint as numbers, to cast it back to BF16 and to measure quantisation errors.

- weight_scale_inv: FP8 in blocks, as DeepSeek and we declare them ("fp8")
- weight_scale with FP8 codes: FP8 by rows, tensors or blocks (compressed-tensors)
- weight_scale_2 with packed bytes: NVFP4 (Model Optimizer)
- others of compressed-tensors, with that library: INT4, MXFP8 and more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.library_formats import PACKED, decompress
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec
from posttrain.checkpoint.quantization import nvfp4
from posttrain.checkpoint.quantization.fp8 import BLOCK, E4M3_MAX, dequantize, row_ranges
from posttrain.errors import CheckpointError

# Suffixes of tensors that accompany a weight's codes.
_ACCOMPANYING = (
    *("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale"),
    *("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_global_scale"),
)
_CODES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")
_METHODS = ("fp8", "compressed-tensors", "modelopt")
FP8_SCALES, GLOBAL_SCALE = ("weight_scale_inv", "weight_scale"), "weight_scale_2"
INT4_MAX = 7.0
# Row ranges are multiples of this, so that they contain whole blocks.
ROW_MULTIPLE = 128


class QuantizedCheckpoint:
    """A quantised checkpoint under the names of the original.

    Args:
        folder: Checkpoint in Hub layout.

    Raises:
        CheckpointError: The method is not supported, or scales are missing.
    """

    def __init__(self, folder: Path):
        self.reader = CheckpointReader(folder)
        self._config = read_object(folder / "config.json").get("quantization_config") or {}
        method = self._config.get("quant_method", "fp8")
        if method not in _METHODS:
            raise CheckpointError(
                "unsupported-quantization", f"{folder}: quant_method {method!r}, we read {', '.join(_METHODS)}"
            )
        self._side = _block_side(folder, self._config)
        self._group_size = _group_size(folder, self._config)
        self._stored = {
            _hub_name(name): name for name in self.reader.names if name.rpartition(".")[2] not in _ACCOMPANYING
        }
        for hf_name, stored in self._stored.items():
            if self.is_quantized(hf_name) and list(self.parts(hf_name)) == [stored]:
                raise CheckpointError(
                    "scales-missing", f"{folder}: {stored} has codes ({self.reader.info(stored).spec}) but no scales"
                )

    @property
    def names(self) -> list[str]:
        """Names of the weights, in index order."""
        return list(self._stored)

    def is_quantized(self, hf_name: str) -> bool:
        """Return whether a weight is stored as codes."""
        return self.reader.dtype(self._stored[hf_name]) in _CODES

    def parts(self, hf_name: str) -> dict[str, int]:
        """Return the stored tensors of a weight: name -> bytes."""
        module = hf_name.removesuffix("weight")
        found = [self._stored[hf_name]]
        if hf_name.endswith(".weight"):
            found += [module + suffix for suffix in _ACCOMPANYING if module + suffix in self.reader]
        return {name: self.reader.info(name).size_bytes for name in found}

    def shape(self, hf_name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        info = self.reader.info(self._stored[hf_name])
        if not self.is_quantized(hf_name) or info.dtype.startswith("F8"):
            return info.shape
        if info.name.endswith(PACKED):
            return tuple(self.reader.tensor(hf_name.removesuffix("weight") + "weight_shape").tolist())
        return (info.shape[0], 2 * info.shape[1])

    def rows(self, hf_name: str, rows: slice) -> torch.Tensor:
        """Return rows of a matrix: float32 if it is stored as codes, otherwise unchanged.

        Args:
            hf_name: Name of the weight.
            rows: From `row_ranges(shape, ROW_MULTIPLE)`.

        Raises:
            CheckpointError: The scales do not fit the codes.
        """
        stored = self._stored[hf_name]
        if not self.is_quantized(hf_name):
            return self.reader.rows(stored, rows.start, rows.stop)
        module = hf_name.removesuffix("weight")
        parts = {name.removeprefix(module): self._rows_of_part(name, hf_name, rows) for name in self.parts(hf_name)}
        codes = parts[stored.removeprefix(module)]
        if GLOBAL_SCALE in parts:
            return nvfp4.decode(codes, parts["weight_scale"], parts[GLOBAL_SCALE])
        scale = next((parts[name] for name in FP8_SCALES if name in parts), None)
        is_plain = codes.dtype == torch.float8_e4m3fn and parts.keys().isdisjoint(("weight_zero_point", "weight_g_idx"))
        if is_plain and scale is not None and scale.is_floating_point():
            return self._plain_fp8(codes, scale.float(), hf_name)
        return decompress(self._config, parts)

    def _plain_fp8(self, codes: torch.Tensor, scale: torch.Tensor, hf_name: str) -> torch.Tensor:
        """Return code * scale for scales per block, per row, per tensor, or per group of a row."""
        num_rows, num_columns = codes.shape
        blocks = (-(-num_rows // self._side), -(-num_columns // self._side))
        if self._group_size and scale.shape == (num_rows, -(-num_columns // self._group_size)):
            return codes.float() * scale.repeat_interleave(self._group_size, dim=1)[:, :num_columns]
        if scale.numel() == 1 or tuple(scale.shape) in ((num_rows, 1), blocks):
            return dequantize(codes, scale, self._side)
        found = f"scales of shape {list(scale.shape)} for codes of shape {list(codes.shape)}"
        raise CheckpointError(
            "scales-shape", f"{self.reader.folder}: {hf_name}: {found}, expected one for each row or {list(blocks)}"
        )

    def tensor(self, hf_name: str) -> torch.Tensor:
        """Return a whole weight: float32 if it is stored as codes, otherwise unchanged."""
        shape = self.shape(hf_name)
        if len(shape) != 2:
            return self.reader.tensor(self._stored[hf_name])
        return torch.cat([self.rows(hf_name, rows) for rows in row_ranges(shape, ROW_MULTIPLE)])

    def full_scale(self, hf_name: str, rows: slice) -> torch.Tensor:
        """Return, for each element of some rows, the largest magnitude that its scale can represent.

        Args:
            hf_name: Name of a weight that is stored as codes.
            rows: From `row_ranges(shape, ROW_MULTIPLE)`.

        Returns:
            float32, broadcastable to the shape of the rows.
        """
        module = hf_name.removesuffix("weight")
        parts = {name.removeprefix(module): self._rows_of_part(name, hf_name, rows) for name in self.parts(hf_name)}
        scale = next(parts[name] for name in FP8_SCALES if name in parts)
        largest = self.largest_code(hf_name) * parts.get(GLOBAL_SCALE, 1.0)
        if scale.numel() == 1:
            return largest * scale.float().reshape(1, 1)
        num_rows, num_columns = rows.stop - rows.start, self.shape(hf_name)[1]
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.float() - 127)
        if not self._has_blocks(hf_name):
            return largest * scale.float().repeat_interleave(num_columns // scale.shape[1], dim=1)
        scale = scale.repeat_interleave(self._side, dim=0)[:num_rows]
        return largest * scale.repeat_interleave(self._side, dim=1)[:, :num_columns]

    def _has_blocks(self, hf_name: str) -> bool:
        """Return whether a weight with several scales has one per block, rather than per row or group."""
        scale = next(self.reader.info(name) for name in self.parts(hf_name) if name.rpartition(".")[2] in FP8_SCALES)
        return scale.dtype in ("F32", "BF16") and scale.shape[0] != self.shape(hf_name)[0] and self._is_fp8(hf_name)

    def _is_fp8(self, hf_name: str) -> bool:
        return self.reader.dtype(self._stored[hf_name]).startswith("F8")

    def largest_code(self, hf_name: str) -> float:
        """Return the largest value of a weight's codes: 448, 6 or 7."""
        if self._is_fp8(hf_name):
            return E4M3_MAX
        return nvfp4.E2M1_MAX if hf_name + nvfp4.GLOBAL_SCALE_SUFFIX in self.reader else INT4_MAX

    def _rows_of_part(self, name: str, hf_name: str, rows: slice) -> torch.Tensor:
        num_rows, num_columns = self.shape(hf_name)
        shape = self.reader.shape(name)
        if name.endswith("weight_shape"):
            return torch.tensor([rows.stop - rows.start, num_columns])
        if len(shape) < 2 or shape[0] == 1:
            return self.reader.tensor(name)
        if name.endswith("weight_zero_point"):
            ratio = num_rows // shape[0]
        else:
            ratio = 1 if shape[0] == num_rows else self._side
        if -(-num_rows // ratio) != shape[0]:
            raise CheckpointError(
                "scales-shape",
                f"{name}: scales of shape {list(shape)} for a weight of {num_rows} rows in blocks of {self._side}",
            )
        return self.reader.rows(name, rows.start // ratio, -(-rows.stop // ratio))


def _block_side(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the side of a block from config.json."""
    groups = config.get("config_groups", {}).values()
    weights = [group.get("weights") or {} for group in groups]
    declared = [config.get("weight_block_size"), *(one.get("block_structure") for one in weights)]
    sides = next((sides for sides in declared if sides), [BLOCK, BLOCK])
    if sides[0] != sides[1] or ROW_MULTIPLE % sides[0]:
        raise CheckpointError(
            "unsupported-quantization",
            f"{folder}: blocks of {sides}, we read square ones whose side divides {ROW_MULTIPLE}",
        )
    return int(sides[0])


def _group_size(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the group size of scales in compressed-tensors' config; 0 without groups.

    Raises:
        CheckpointError: Modules are quantised in several ways, which is not supported.
    """
    groups = [(group.get("format"), group.get("weights")) for group in config.get("config_groups", {}).values()]
    if any(group != groups[0] for group in groups):
        raise CheckpointError(
            "unsupported-quantization",
            f"{folder}: config_groups with {len(groups)} different weights or formats, we read one",
        )
    weights = (groups[0][1] or {}) if groups else {}
    return int(weights.get("group_size") or 0) if weights.get("strategy") == "group" else 0


def _hub_name(stored: str) -> str:
    return stored.removesuffix(PACKED) + "weight" if stored.endswith(f".{PACKED}") else stored


class CastToBf16:
    """The cast of a quantised checkpoint back to BF16; a `converted_folder.Recoding`.

    A weight is code * scale in float32, rounded to the nearest BF16. Other tensors stay unchanged.

    Args:
        source: A quantised checkpoint in Hub layout.

    Raises:
        CheckpointError: Nothing is quantised, or the format is not supported.
    """

    def __init__(self, source: Path):
        self._quantized = QuantizedCheckpoint(source)
        self.reader = self._quantized.reader
        self.names: Sequence[str] = self._quantized.names
        self.settings: Mapping[str, Any] = {"format": "bf16"}
        if not any(self._quantized.is_quantized(name) for name in self.names):
            raise CheckpointError("not-quantized", f"{source}: nothing in it is quantised; use it as it is")

    def specs(self, hf_name: str) -> Mapping[str, TensorSpec]:
        """Return name, shape and dtype of a weight."""
        if self._quantized.is_quantized(hf_name):
            return {hf_name: TensorSpec(self._quantized.shape(hf_name), "BF16")}
        return {hf_name: self.reader.info(hf_name).spec}

    def recode(self, hf_name: str) -> Mapping[str, torch.Tensor]:
        """Return a weight in BF16."""
        if not self._quantized.is_quantized(hf_name):
            return {hf_name: self.reader.tensor(hf_name)}
        shape = self._quantized.shape(hf_name)
        value = torch.empty(shape, dtype=torch.bfloat16)
        for rows in row_ranges(shape, ROW_MULTIPLE):
            value[rows] = self._quantized.rows(hf_name, rows)
        return {hf_name: value}

    def small_files(self) -> Mapping[str, Any]:
        """Return config.json without its `quantization_config`; omit Model Optimizer's own file."""
        config = read_object(self.reader.folder / "config.json")
        config.pop("quantization_config", None)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        return {"config.json": {**config, key: "bfloat16"}, nvfp4.QUANT_CONFIG_NAME: None}

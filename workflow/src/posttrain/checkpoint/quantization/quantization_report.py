"""Quantisation errors, saturation and size, measured on the files per class of tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.quantization.dequantize import INT4_MAX, ROW_MULTIPLE, QuantizedCheckpoint
from posttrain.checkpoint.quantization.fp8 import E4M3_MAX, row_ranges
from posttrain.checkpoint.quantization.nvfp4 import E2M1_MAX
from posttrain.checkpoint.quantization.quantized_names import tensor_class
from posttrain.errors import CheckpointError

# Digits beyond this depend on the machine's vector width.
_DIGITS = 6
# Largest code -> half a step beyond it, relative to it; larger values were clamped.
# (INT4 scales are rounded to BF16, which adds 0.04.)
_HEADROOM = {E4M3_MAX: 464 / E4M3_MAX, E2M1_MAX: 7 / E2M1_MAX, INT4_MAX: 7.54 / INT4_MAX}


@dataclass(frozen=True)
class TensorError:
    """Quantisation error of one tensor.

    Args:
        num_elements: Elements of the weight.
        bytes_before: Size in the source.
        bytes_after: Size of codes and scales.
        error_square_sum: Sum of (w - code * scale)^2.
        weight_square_sum: Sum of w^2.
        max_abs_error: Largest |w - code * scale|.
        max_abs_weight: Largest |w|.
        max_scaled_error: Largest |w - code * scale|, relative to the largest magnitude under that scale.
        num_saturated: Weights that exceed that magnitude by more than rounding explains, and were clamped.
    """

    num_elements: int
    bytes_before: int
    bytes_after: int
    error_square_sum: float
    weight_square_sum: float
    max_abs_error: float
    max_abs_weight: float
    max_scaled_error: float
    num_saturated: int


def verify_weights(source: Path, folder: Path, num_threads: int = 1) -> dict[str, Any]:
    """Compare a quantised checkpoint with its source.

    Args:
        source: Checkpoint in Hub layout.
        folder: The quantised checkpoint.
        num_threads: Number of tensors compared at a time.

    Returns:
        See `summarize`.

    Raises:
        CheckpointError: Tensors are missing, have another shape, are not finite, or differ although they were copied;
            lists them.
    """
    reader, quantized = CheckpointReader(source), QuantizedCheckpoint(folder)
    results: list[TensorError | str | None] = []
    problems = [f"{name} is missing" for name in reader.names if name not in set(quantized.names)]
    problems += [f"{name} is not in the source" for name in quantized.names if name not in reader]
    if not problems:
        with ThreadPoolExecutor(num_threads) as pool:
            results = list(pool.map(lambda name: _compare(reader, quantized, name), reader.names))
        problems = [result for result in results if isinstance(result, str)]
    if problems:
        raise CheckpointError(
            "quantization-differs", f"{folder}: not what {source} gives:\n  " + "\n  ".join(problems[:20])
        )
    compared = zip(reader.names, results, strict=True)
    errors = {name: result for name, result in compared if isinstance(result, TensorError)}
    return summarize(dict(sorted(errors.items())))


def _compare(reader: CheckpointReader, quantized: QuantizedCheckpoint, name: str) -> TensorError | str | None:
    """Return the error of a quantised tensor, None for a copied one, or a problem as text."""
    if quantized.shape(name) != reader.shape(name):
        return f"{name}: shape {list(quantized.shape(name))}, the source has {list(reader.shape(name))}"
    if not quantized.is_quantized(name):
        same = torch.equal(_bytes(quantized.reader.tensor(name)), _bytes(reader.tensor(name)))
        return None if same else f"{name}: was copied, and differs"
    error = measure(reader, quantized, name)
    return error if math.isfinite(error.error_square_sum) else f"{name}: code * scale is NaN or infinite"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def measure(reader: CheckpointReader, quantized: QuantizedCheckpoint, name: str) -> TensorError:
    """Compare a weight with its codes and scales, one range of rows at a time."""
    weight = reader.info(name)
    headroom = _HEADROOM[quantized.largest_code(name)]
    before, after = weight.size_bytes, sum(quantized.parts(name).values())
    found = TensorError(math.prod(weight.shape), before, after, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    for rows in row_ranges(weight.shape, ROW_MULTIPLE):
        values = reader.rows(name, rows.start, rows.stop).float()
        error = (values - quantized.rows(name, rows)).abs_()
        full_scale = quantized.full_scale(name, rows)
        found = dataclasses.replace(
            found,
            error_square_sum=found.error_square_sum + error.square().sum(dtype=torch.float64).item(),
            weight_square_sum=found.weight_square_sum + values.square().sum(dtype=torch.float64).item(),
            max_abs_error=max(found.max_abs_error, error.max().item()),
            max_abs_weight=max(found.max_abs_weight, values.abs().max().item()),
            max_scaled_error=max(found.max_scaled_error, (error / full_scale).max().item()),
            num_saturated=found.num_saturated + int((values.abs() > full_scale * headroom).sum()),
        )
    return found


def summarize(errors: Mapping[str, TensorError]) -> dict[str, Any]:
    """Aggregate the tensors' errors to one row per class and one for all.

    Args:
        errors: Hub name -> error. The order affects the last bits of the sums: pass them sorted.

    Returns:
        Class -> tensors, elements, bytes, compression, relative error (root of the ratio of the sums of
        squares), largest error, largest weight, number of saturated weights.
    """
    groups: dict[str, list[TensorError]] = {}
    for name, error in errors.items():
        groups.setdefault(tensor_class(name), []).append(error)
        groups.setdefault("all", []).append(error)
    return {kind: _join(rows) for kind, rows in sorted(groups.items())}


def _join(rows: list[TensorError]) -> dict[str, Any]:
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    squares = sum(row.weight_square_sum for row in rows)
    errors = sum(row.error_square_sum for row in rows)
    return {
        "num_tensors": len(rows),
        "num_elements": sum(row.num_elements for row in rows),
        "bytes_before": before,
        "bytes_after": after,
        "compression": _rounded(before / after),
        "relative_error": _rounded(math.sqrt(errors / squares) if squares else 0.0),
        "max_abs_error": _rounded(max(row.max_abs_error for row in rows)),
        "max_abs_weight": _rounded(max(row.max_abs_weight for row in rows)),
        "max_scaled_error": _rounded(max(row.max_scaled_error for row in rows)),
        "num_saturated": sum(row.num_saturated for row in rows),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")

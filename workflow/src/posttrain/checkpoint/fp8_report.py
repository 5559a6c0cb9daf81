"""What quantisation did to the weights: errors, extremes and size, per class of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.checkpoint.fp8 import BLOCK, E4M3_MAX, E4M3_SATURATION, dequantize_block, tensor_class, tiles


@dataclass(frozen=True)
class TensorError:
    """What quantisation did to one tensor.

    Args:
        num_elements: Of the weight.
        bytes_before: In the source.
        bytes_after: Of codes and scales.
        error_square_sum: Sum of (w - code * scale)^2.
        weight_square_sum: Sum of w^2.
        max_abs_error: Largest |w - code * scale|.
        max_abs_weight: Largest |w|.
        num_saturated: Weights that were cut off at 448 * scale; none, unless a scale met its floor.
    """

    num_elements: int
    bytes_before: int
    bytes_after: int
    error_square_sum: float
    weight_square_sum: float
    max_abs_error: float
    max_abs_weight: float
    num_saturated: int


def measure(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> TensorError:
    """Compare a weight [N, K] with what its codes and scales stand for; sums are taken in FP64."""
    values = weight.float()
    error = (values - dequantize_block(codes, scale)).abs()
    # Rounding alone moves a number by at most half the distance from 448 to the number that would follow it.
    moved_by_rounding = (E4M3_SATURATION - E4M3_MAX) * (1 + 1e-5) * scale
    num_saturated = (tiles(error, BLOCK) > moved_by_rounding[:, None, :, None]).sum()
    return TensorError(
        num_elements=weight.numel(),
        bytes_before=weight.nbytes,
        bytes_after=codes.nbytes + scale.nbytes,
        error_square_sum=error.square().sum(dtype=torch.float64).item(),
        weight_square_sum=values.square().sum(dtype=torch.float64).item(),
        max_abs_error=error.max().item(),
        max_abs_weight=values.abs().max().item(),
        num_saturated=int(num_saturated.item()),
    )


def summarize(errors: Mapping[str, TensorError]) -> dict[str, Any]:
    """Join the tensors' errors to one row per class and one for all.

    Args:
        errors: Name on the Hub -> error. The order decides the last bits of the sums: pass them sorted.

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
        "compression": before / after,
        "relative_error": math.sqrt(errors / squares) if squares else 0.0,
        "max_abs_error": max(row.max_abs_error for row in rows),
        "max_abs_weight": max(row.max_abs_weight for row in rows),
        "num_saturated": sum(row.num_saturated for row in rows),
    }

"""Divides by the response limit, whatever the lengths.

Source: Dr. GRPO (arXiv 2503.20783), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def denominators(lengths: torch.Tensor, micro_batches: Sequence[Sequence[int]], longest: int) -> torch.Tensor:
    """Return N times `longest` for N samples of lengths [N] fp64.

    Example:
        Lengths (1, 3) and a limit of 4: (8, 8).
    """
    return torch.full_like(lengths, float(len(lengths) * longest))

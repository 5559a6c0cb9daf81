"""Every token of the global batch counts the same.

Source: DAPO (arXiv 2503.14476), section 3.3, equation 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def denominators(lengths: torch.Tensor, micro_batches: Sequence[Sequence[int]], longest: int) -> torch.Tensor:
    """Return sum(L) for samples of lengths L [N] fp64.

    Example:
        Lengths (1, 3): (4, 4).
    """
    return torch.full_like(lengths, float(lengths.sum()))

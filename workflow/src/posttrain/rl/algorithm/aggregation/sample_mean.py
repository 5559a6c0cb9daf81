"""Every sample counts the same, and so does every token of one sample.

Source: DeepSeekMath (arXiv 2402.03300), equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def denominators(lengths: torch.Tensor, micro_batches: Sequence[Sequence[int]], longest: int) -> torch.Tensor:
    """Return N L_i for samples of lengths L [N] fp64.

    Example:
        Lengths (1, 3): (2, 6).
    """
    return len(lengths) * lengths

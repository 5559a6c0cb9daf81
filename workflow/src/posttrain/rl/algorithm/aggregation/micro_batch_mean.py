"""Every token of a micro-batch counts the same, and so does every micro-batch.

The loss then depends on how the global batch is split: `trainer.max_tokens_per_gpu` and the number of ranks change it.
Trainers that divide each micro-batch by its own token count compute this (TRL calls it BNPO's aggregation).

Source: BNPO (arXiv 2506.02864), in the implementation of TRL, whose gradients are means over local batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def denominators(lengths: torch.Tensor, micro_batches: Sequence[Sequence[int]], longest: int) -> torch.Tensor:
    """Return, for samples of lengths [N] fp64, the tokens of their micro-batch times the number of micro-batches.

    Example:
        Lengths (1, 3, 4), micro-batches (0, 1) and (2): (8, 8, 8); micro-batches (0) and (1, 2): (2, 14, 14).
    """
    values = torch.zeros_like(lengths)
    for indices in micro_batches:
        values[list(indices)] = lengths[list(indices)].sum() * len(micro_batches)
    return values

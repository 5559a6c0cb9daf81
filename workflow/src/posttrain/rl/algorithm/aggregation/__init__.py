"""Aggregates token losses: the weight of each response token in the loss of a global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.rl.algorithm.parts import load_part


def token_weights(
    name: str, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]], longest: int
) -> torch.Tensor:
    """Return [N] fp32; see `Objective.token_weights`.

    Args:
        name: A part of this folder.
        lengths: Response tokens of each sample; 0 for one that does not count.
        micro_batches: Samples of each micro-batch of all ranks.
        longest: The response limit in tokens.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    weights = 1.0 / load_part("aggregation", name).denominators(counts, micro_batches, longest)
    return torch.where(counts > 0, weights, 0.0).float()

"""Leave-one-out: compares a response with the mean of the others to the same prompt.

    A_i = r_i - mean of r_j over j != i

The advantage of a group of one is 0.

Source: Back to Basics (arXiv 2402.14740), section 3.2, RLOO.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.advantage.grpo import centered
from posttrain.rl.algorithm.settings import Algorithm


def advantages(rewards: torch.Tensor, lengths: torch.Tensor, settings: Algorithm) -> torch.Tensor:
    """Return the advantage of each sample [G, n]; see `advantage.grpo`.

    Example:
        Rewards (1, 0, 0, 1): the others have means (1/3, 2/3, 2/3, 1/3), the advantages are (2/3, -2/3, -2/3, 2/3).
    """
    size = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return centered(rewards) * (size / (size - 1).clamp(min=1))

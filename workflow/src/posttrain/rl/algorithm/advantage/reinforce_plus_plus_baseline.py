"""The difference from the group's mean, whitened over all response tokens of the rollout.

    A_i = r_i - mean(r of the group),   then   (A_i - mean(A)) / sqrt(var(A) + 1e-8)

Every token has the advantage of its response, so mean and variance (divisor T - 1) count a response once per token.
Groups are not divided by their own standard deviation, so they keep the weight that their rewards give them.

Source: REINFORCE++ (arXiv 2501.03262), section on REINFORCE++ with baseline.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.advantage.grpo import centered
from posttrain.rl.algorithm.settings import Algorithm

# Inside the root: its square root is a hundredth of a percent of a reward of 1.
VARIANCE_EPSILON = 1e-8


def advantages(rewards: torch.Tensor, lengths: torch.Tensor, settings: Algorithm) -> torch.Tensor:
    """Return the advantage of each sample [G, n]; see `advantage.grpo`. All are 0 where all groups have equal rewards.

    Example:
        One group, rewards (1, 0), lengths (1, 3): A (1/2, -1/2), mean -1/4, variance (9/16 + 3/16) / 3 = 1/4, so the
        advantages are (1.5, -0.5).
    """
    is_graded = ~rewards.isnan()
    values, weights = centered(rewards).double(), lengths.double() * is_graded
    count = weights.sum()
    difference = values - (values * weights).sum() / count.clamp(min=1)
    variance = (difference**2 * weights).sum() / (count - 1).clamp(min=1)
    return (difference / (variance + VARIANCE_EPSILON).sqrt() * is_graded).float()

"""Group-relative advantages: a response is compared with the others to the same prompt.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

`std` is the sample standard deviation (divisor n - 1). Without the division this is Dr. GRPO's estimator. A group whose
rewards are all equal teaches nothing, and a group of one has nobody to be compared with: its advantages are exactly 0.
A sample without a reward (NaN) is compared with nobody and nobody with it: its advantage is 0, the others' are those of
a group without it.

Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; Dr. GRPO (arXiv 2503.20783), section 3.
"""

from __future__ import annotations

import torch

from posttrain.algorithm.settings import Algorithm

# Keeps a group of equal rewards from dividing by zero; far below the deviation of any group that differs.
STD_EPSILON = 1e-6


def advantages(rewards: torch.Tensor, lengths: torch.Tensor, settings: Algorithm) -> torch.Tensor:
    """Return the advantage of each sample in its group.

    Args:
        rewards: [G, n] fp32, one row per prompt; NaN for a sample that has none.
        lengths: [G, n] int64, response tokens; not used.
        settings: `normalize_by_std` is used.

    Returns:
        [G, n] fp32.

    Example:
        Rewards (1, 0, 0, 1) give (0.5, -0.5, -0.5, 0.5) / (0.57735 + 1e-6) = (0.866, -0.866, -0.866, 0.866).
    """
    values = centered(rewards)
    if settings.normalize_by_std and rewards.shape[1] > 1:
        values = values / (deviation(rewards) + STD_EPSILON)
    return values


def centered(rewards: torch.Tensor) -> torch.Tensor:
    """Return the difference from the group's mean [G, n], exactly 0 where all rewards of a group are equal."""
    is_graded = ~rewards.isnan()
    values = rewards - rewards.nanmean(dim=1, keepdim=True)
    # Rounding may move the mean of equal rewards away from them: the rewards tell, not the difference.
    first = rewards.gather(1, is_graded.int().argmax(dim=1, keepdim=True))
    all_equal = ((rewards == first) | ~is_graded).all(dim=1, keepdim=True)
    return values.masked_fill(all_equal | ~is_graded, 0.0)


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Return the sample standard deviation of each group's rewards that are not NaN [G, 1]; 0 of fewer than two."""
    whole = rewards.std(dim=1, keepdim=True)
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    squares = (rewards - rewards.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    # A group whose rewards are all there keeps the bits of torch's formula.
    return torch.where(whole.isnan(), (squares / (count - 1).clamp(min=1)).sqrt(), whole)

"""Group-relative advantages: a response is compared with the others to the same prompt.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

`std` is the sample standard deviation (divisor n - 1). Without the division this is Dr. GRPO's estimator. If all
rewards of a group are equal, or the group has one sample, its advantages are exactly 0. Rewards count as equal if they
differ by no more than FP32 rounding, such as the same score summed in another order. A sample without a reward (NaN) is
ignored: its advantage is 0, and the others' are those of a group without it.

Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; Dr. GRPO (arXiv 2503.20783), section 3.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.settings import Algorithm

# Keeps a group of equal rewards from dividing by zero; far below the deviation of any group that differs.
STD_EPSILON = 1e-6
# Relative to the group's largest reward: two FP32 rounding steps.
RESOLUTION = 2.0**-22
# The square of a larger number may be infinite; scaled so, even that of 2**127 is finite.
_LARGE, _LARGE_SCALE = 2.0**50, 2.0**-80


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
    """Return the difference from the group's mean [G, n], exactly 0 if all rewards of a group are equal."""
    is_graded, scale = ~rewards.isnan(), _scale(rewards)
    values = (rewards * scale - (rewards * scale).nanmean(dim=1, keepdim=True)) / scale
    # Rounding may shift the mean of equal rewards, so test the rewards, not the difference.
    return values.masked_fill(_are_equal(rewards) | ~is_graded, 0.0)


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Return the sample standard deviation of each group's non-NaN rewards [G, 1]; 0 for fewer than two."""
    scale = _scale(rewards)
    scaled = rewards * scale
    whole = scaled.std(dim=1, keepdim=True)
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    squares = (scaled - scaled.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    # A group without NaN keeps the bits of torch's formula.
    return torch.where(whole.isnan(), (squares / (count - 1).clamp(min=1)).sqrt(), whole) / scale


def _are_equal(rewards: torch.Tensor) -> torch.Tensor:
    """Return for each group [G, 1] whether its rewards differ by no more than their rounding."""
    is_missing = rewards.isnan()
    highest = rewards.masked_fill(is_missing, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(is_missing, torch.inf).amin(dim=1, keepdim=True)
    return highest - lowest <= RESOLUTION * _largest(rewards)


def _scale(rewards: torch.Tensor) -> torch.Tensor:
    """Return a power of two for each group [G, 1] that keeps its sums and squares finite; 1 for usual rewards."""
    return torch.where(_largest(rewards) > _LARGE, _LARGE_SCALE, 1.0)


def _largest(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.nan_to_num(0.0).abs().amax(dim=1, keepdim=True)

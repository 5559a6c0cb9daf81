"""Corrects for engine sampling: weights a token's loss with the trainer/engine probability ratio, up to a bound.

    factor = min(exp(d), correction_high),   d = trainer - engine, at the level of `correction_level`

The bound keeps the variance finite: it is the weight of a token that the engine finds much less likely than the
trainer. The factor carries no gradient.

Source: Ionides, Truncated Importance Sampling (2008); for engines, Yao et al., Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training (2025), whose bound is 2.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.settings import Algorithm


def factors(log_ratio: torch.Tensor, settings: Algorithm) -> torch.Tensor:
    """Return the factor of each token's loss.

    Args:
        log_ratio: [T], the trainer's log-probability before the update minus the engine's.
        settings: `correction_high` is used.

    Returns:
        [T], never above the bound.

    Example:
        Ratios (0.5, 1.5, 9) and a bound of 2: (0.5, 1.5, 2).
    """
    return log_ratio.exp().clamp(max=settings.correction_high)

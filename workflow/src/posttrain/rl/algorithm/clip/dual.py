"""The decoupled clip with a second bound for negative advantages.

For a negative advantage the loss -w A is otherwise unbounded. For an importance ratio w and advantage A, with bound
c = clip_ratio_dual above 1 + clip_ratio_high:

    loss = min(decoupled(w, A), -c A)   where A < 0, decoupled(w, A) elsewhere

Source: Mastering Complex Control in MOBA Games with Deep Reinforcement Learning (arXiv 1912.09729), section "Dual-Clip
PPO", equation 5.
"""

from __future__ import annotations

import math

import torch

from posttrain.rl.algorithm.clip import decoupled
from posttrain.rl.algorithm.settings import Algorithm


def token_losses(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, settings: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether it was clipped; see `clip.decoupled`.

    Example:
        Ratio 5, bound 3: advantage -1 gives 3 (clipped) instead of 5.
    """
    # A ratio beyond the bound has the loss and the (zero) gradient of the bound.
    held = torch.where(advantages < 0, log_ratio.clamp(max=math.log(settings.clip_ratio_dual)), log_ratio)
    losses, clipped = decoupled.token_losses(held, logprobs, advantages, settings)
    return losses, clipped | (held < log_ratio)

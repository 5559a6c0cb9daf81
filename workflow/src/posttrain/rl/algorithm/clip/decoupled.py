"""The clipped objective with separate bounds for both directions.

For an importance ratio w and advantage A:

    loss = max(-w A,  -clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

The clip stops the gradient once a token has moved far enough in the direction of its advantage; the higher upper bound
leaves unlikely tokens room to grow ("clip higher").

A ratio too large for FP32 (log ratio above 88) is infinite, but the clip still applies: for A > 0 the loss is
-(1 + clip_ratio_high) A without gradient, for A = 0 it is 0 without gradient. For A < 0 the loss is unbounded and
infinite.

Source: PPO (arXiv 1707.06347), equation 7; DAPO (arXiv 2503.14476), section 3.1, equation 10.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.settings import Algorithm

# Beyond every clip, and far from overflow: exp(60) is 1e26.
LARGE_LOG_RATIO = 60.0


def token_losses(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, settings: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether it was clipped.

    Args:
        log_ratio: [T] fp32; carries the gradient.
        logprobs: [T] fp32, not used.
        advantages: [T] fp32.
        settings: `clip_ratio_low` and `clip_ratio_high` are used.

    Returns:
        Loss [T] fp32, and clipped [T] bool: true where the clipped objective was the larger.

    Example:
        Ratio 1.5, bounds 0.2 and 0.28: advantage +1 gives -1.28 (clipped), advantage -1 gives 1.5 (not clipped).
    """
    ratio = finite_ratio(log_ratio, where=advantages >= 0)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high) * advantages
    return torch.maximum(free, bounded), bounded > free


def finite_ratio(log_ratio: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) [T], kept finite `where` a clip applies, because infinity times a zero gradient is NaN."""
    too_large = log_ratio.isfinite() & log_ratio.exp().isinf() & where
    return log_ratio.masked_fill(too_large, LARGE_LOG_RATIO).exp()

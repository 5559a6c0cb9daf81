"""The clipped policy objective with separate bounds for both directions.

For a token with importance ratio w = exp(logprobs - old_logprobs) and advantage A:

    loss = max(-w A,  -clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

The clip stops the gradient once a token has moved far enough in the direction its advantage asks for; the higher upper
bound leaves unlikely tokens room to grow ("clip higher"). The loss is per token; `aggregation` says what it is divided
by.

A ratio too large for FP32 (a log ratio above 88) is infinite there, and the clip still decides: loss -(1 +
clip_ratio_high) A and no gradient where A > 0, loss 0 and no gradient where A = 0. Where A < 0 nothing bounds it: it is
infinite.

How far the update has moved is told by `approximate_kl`. A log-probability that is not finite is counted, never
replaced: a NaN that became 0 would be a token that silently teaches nothing.

Source: PPO (arXiv 1707.06347), equation 7; DAPO (arXiv 2503.14476), section 3.1, equation 10; Schulman, Approximating
KL Divergence (2020), k3.
Shapes: T tokens.
"""

from __future__ import annotations

import torch

# Beyond every clip, and far from overflow: exp(60) is 1e26.
LARGE_LOG_RATIO = 60.0


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether the clip decided it.

    Args:
        logprobs: [T] fp32 of the policy being trained; carries the gradient.
        old_logprobs: [T] fp32 of the policy before the update.
        advantages: [T] fp32.
        clip_ratio_low: Lower bound is 1 - this.
        clip_ratio_high: Upper bound is 1 + this.

    Returns:
        Loss [T] fp32, and clipped [T] bool: true where the clipped objective was the larger.

    Example:
        Ratio 1.5, bounds 0.2 and 0.28: advantage +1 gives -1.28 (clipped), advantage -1 gives 1.5 (not clipped).
    """
    log_ratio = logprobs - old_logprobs
    # Infinity times a gradient of 0 is NaN: where the clip decides, a smaller ratio stands in for one that overflows.
    too_large = log_ratio.isfinite() & log_ratio.exp().isinf() & (advantages >= 0)
    ratio = log_ratio.masked_fill(too_large, LARGE_LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    return torch.maximum(free, bounded), bounded > free


def approximate_kl(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ratio - 1 - log ratio of each token; its mean over tokens that the old policy sampled is KL(old || new).

    Args:
        logprobs: [T] of the policy now.
        old_logprobs: [T] of the policy that sampled.

    Returns:
        [T], never negative.

    Example:
        A token that became twice as likely: 2 - 1 - ln 2 = 0.3069.
    """
    log_ratio = logprobs - old_logprobs
    return log_ratio.exp() - 1 - log_ratio


def count_non_finite(*tensors: torch.Tensor) -> int:
    """Return how many values are NaN or infinite."""
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)

"""One ratio per token: of its probabilities now and before.

Source: PPO (arXiv 1707.06347), equation 6; DeepSeekMath (arXiv 2402.03300), equation 3.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.objective import TokenBatch


def combine(log_ratios: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the log ratios [T] unchanged."""
    return log_ratios

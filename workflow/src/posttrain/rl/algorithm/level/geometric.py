"""One ratio per sequence: the geometric mean of its tokens' ratios, so that it does not scale with length.

    s_i = (pi(y_i) / pi_old(y_i)) ^ (1 / |y_i|)

Source: GSPO (arXiv 2507.18071), equation 7.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.objective import TokenBatch


def combine(log_ratios: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the log ratio of each token's sequence [T]: the mean over its response tokens.

    Example:
        A response with log ratios (0.1, 0.3): 0.2 at each of its tokens.
    """
    return batch.per_sequence(log_ratios, torch.mean)

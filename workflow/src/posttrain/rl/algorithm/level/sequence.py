"""One ratio per sequence: the product of its tokens' ratios, which is that of the whole response's probabilities.

Source: RLOO (arXiv 2402.14740), section 3.2, where a response is one action; for the engine correction, see
    `correction/mask.py`.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.objective import TokenBatch


def combine(log_ratios: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the log ratio of each token's sequence [T]: the sum over its response tokens.

    Example:
        A response with log ratios (0.1, 0.3): 0.4 at each of its tokens.
    """
    return batch.per_sequence(log_ratios, torch.sum)

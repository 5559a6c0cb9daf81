"""CISPO: clips each token's importance weight and keeps its gradient.

For an importance ratio w, advantage A and log-probability l:

    loss = -stop_gradient(clip(w, 1 - clip_ratio_low, 1 + clip_ratio_high)) A l

With clip_ratio_low = 1 there is no lower bound, as in the paper's experiments.

Source: MiniMax-M1 (arXiv 2506.13585), section 3.1, equations 4 and 5.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.settings import Algorithm


def token_losses(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, settings: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token and whether its weight was clipped; see `clip.decoupled`.

    Example:
        Ratio 1.5, upper bound 0.28, log-probability -2: advantage +1 gives -1.28 x -2 = 2.56.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    return -weight * advantages * logprobs, weight != ratio

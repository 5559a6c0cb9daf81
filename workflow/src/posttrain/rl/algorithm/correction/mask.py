"""Corrects for engine sampling: weights a token's loss with the trainer/engine probability ratio, 0 outside of bounds.

    factor = exp(d) where correction_low <= exp(d) <= correction_high, else 0

with d = trainer - engine at the level of `correction_level`: of a token (IcePop, with bounds 0.5 and 5), of a sequence
(masked importance sampling), or of a sequence by the geometric mean of its tokens. Masked tokens have no gradient but
still count in the loss's denominator. The factor carries no gradient.

Source: IcePop, Every Step Evolves (arXiv 2510.18855), section 2.3; Liu et al., When Speed Kills Stability: Demystifying
RL Collapse from the Training-Inference Mismatch (2025), masked importance sampling.
"""

from __future__ import annotations

import torch

from posttrain.rl.algorithm.settings import Algorithm


def factors(log_ratio: torch.Tensor, settings: Algorithm) -> torch.Tensor:
    """Return the factor of each token's loss; see `correction.truncate`.

    Example:
        Ratios (0.4, 0.5, 1.5, 9) and bounds 0.5 and 5: (0, 0.5, 1.5, 0).
    """
    ratio = log_ratio.exp()
    is_kept = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
    return ratio.where(is_kept, 0.0)

"""How far the engine's log-probabilities are from the trainer's, on the same tokens.

With d = trainer - engine per token: the importance weight of the engine's sample under the trainer is exp(d).

    abs_diff_mean           mean |d|
    kl_k3                   mean (exp(d) - 1 - d), an unbiased, non-negative estimate of KL(engine || trainer) for
                            tokens sampled by the engine
    effective_sample_size   (sum exp(d))^2 / (T sum exp(2 d)): 1 when both agree, near 0 when few tokens carry the
                            weight

Source: Schulman, Approximating KL Divergence (2020), k3; Kong, effective sample size (1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mismatch:
    """The difference of two sets of log-probabilities; see the module docstring."""

    abs_diff_mean: float
    abs_diff_max: float
    kl_k3: float
    effective_sample_size: float


def compare_logprobs(trainer: torch.Tensor, engine: torch.Tensor) -> Mismatch:
    """Compare log-probabilities token by token.

    Args:
        trainer: [T].
        engine: [T], of the same tokens.

    Raises:
        ValueError: A side is empty or not finite, or the lengths differ.

    Example:
        Trainer (-1, -2), engine (-1, -2 - ln 2), so d is (0, 0.6931): abs_diff_mean 0.3466, abs_diff_max 0.6931, kl_k3
        (2 - 1 - 0.6931) / 2 = 0.1534, effective_sample_size (1 + 2)^2 / (2 (1 + 4)) = 0.9.
    """
    if trainer.shape != engine.shape or trainer.numel() == 0:
        raise ValueError(f"log-probabilities of the same tokens, got {list(trainer.shape)} and {list(engine.shape)}")
    difference = trainer.double() - engine
    if not torch.isfinite(difference).all():
        raise ValueError(f"log-probabilities must be finite; {(~torch.isfinite(difference)).sum()} differences are not")
    weights = difference.exp()
    return Mismatch(
        abs_diff_mean=float(difference.abs().mean()),
        abs_diff_max=float(difference.abs().max()),
        kl_k3=float((weights - 1 - difference).mean()),
        effective_sample_size=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    )

"""A token of each row, from the row's own random numbers.

Row r draws one uniform u in [0, 1) per token from a generator seeded with its `sampling_seed`, and takes the
first token whose cumulative probability exceeds u (inverse of the distribution function, in float64). So its
random numbers do not depend on the rows beside it, nor on how the batch shrinks.

The log-probability is that of the tempered distribution, log_softmax(logits / temperature) in float32:
SGLang's convention, and what the trainer computes. Temperature 0 takes the likeliest token and reports
temperature 1's value.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class RowSampler:
    """Samples one token per live row.

    Args:
        seeds: `sampling_seed` of each row; None draws one from the operating system.
        temperatures: Of each row, 0 for greedy.
    """

    def __init__(self, seeds: Sequence[int | None], temperatures: Sequence[float]):
        self._generators = [np.random.Generator(np.random.PCG64(_entropy(seed))) for seed in seeds]
        self._greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        self._divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], dtype=torch.float32)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order."""
        self._generators = [self._generators[row] for row in rows]
        self._greedy, self._divisors = self._greedy[list(rows)], self._divisors[list(rows)]

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token per row.

        Args:
            logits: [B, V] any float dtype.

        Returns:
            Tokens [B] int64 and their log-probabilities [B] float32.

        Raises:
            FloatingPointError: When a logit is not finite.
        """
        tempered = logits.float() / self._divisors[:, None]
        if not torch.isfinite(tempered).all():
            raise FloatingPointError("the model's logits are not finite: its weights are damaged or overflow")
        uniforms = torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)
        tokens = inverse_cdf(tempered, uniforms)
        if self._greedy.any():
            tokens = torch.where(self._greedy, tempered.argmax(-1), tokens)
        logprobs = torch.log_softmax(tempered, dim=-1).gather(1, tokens[:, None])
        return tokens, logprobs[:, 0]


def inverse_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds u.

    Args:
        logits: [B, V] float32.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64; never a token of probability 0.

    Example:
        Probabilities (0.25, 0, 0.75): u = 0.2 gives token 0, u = 0.25 gives token 2.
    """
    cumulative = torch.softmax(logits.double(), dim=-1).cumsum(-1)
    # The product may round up to the total itself, which no cumulative probability exceeds.
    below_total = torch.nextafter(cumulative[:, -1], torch.zeros_like(uniforms))
    thresholds = torch.minimum(uniforms * cumulative[:, -1], below_total)
    return torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]


def _entropy(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**64

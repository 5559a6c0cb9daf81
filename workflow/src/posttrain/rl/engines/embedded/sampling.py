"""Samples a token for each row, with the row's own random numbers.

Row r draws one uniform u in [0, 1) per token from a generator seeded with its `sampling_seed`, and takes the
first token whose cumulative probability exceeds u (inverse CDF, in float64). So its random numbers depend
neither on other rows nor on how the batch shrinks.

The log-probability is that of the tempered distribution, log_softmax(logits / temperature) in float32:
SGLang's convention, and what the trainer computes. Temperature 0 takes the most likely token and reports
temperature 1's value. `top_p` excludes tokens from sampling without renormalising the log-probabilities of
the rest, also SGLang's convention.

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
        temperatures: One per row, 0 for greedy.
        top_ps: Nucleus probability of each row; by default 1.
    """

    def __init__(self, seeds: Sequence[int | None], temperatures: Sequence[float], top_ps: Sequence[float] = ()):
        self._generators = [np.random.Generator(np.random.PCG64(_entropy(seed))) for seed in seeds]
        self._greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        self._divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], dtype=torch.float32)
        self._top_ps = torch.tensor(top_ps or [1.0] * len(seeds), dtype=torch.float64)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order."""
        self._generators = [self._generators[row] for row in rows]
        self._greedy, self._divisors = self._greedy[list(rows)], self._divisors[list(rows)]
        self._top_ps = self._top_ps[list(rows)]

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities that rows report, [B, V] float32, from their logits [B, V]."""
        return torch.log_softmax(self._tempered(logits), dim=-1)

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token per row.

        Args:
            logits: [B, V] any float dtype.

        Returns:
            Tokens [B] int64 and their log-probabilities [B] float32.

        Raises:
            FloatingPointError: A logit is not finite.
        """
        tempered = self._tempered(logits)
        if not torch.isfinite(tempered).all():
            raise FloatingPointError("the model's logits are not finite: its weights are damaged or overflow")
        uniforms = torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)
        is_cut = bool((self._top_ps < 1).any())
        tokens = inverse_cdf(nucleus(tempered, self._top_ps) if is_cut else tempered, uniforms)
        if self._greedy.any():
            tokens = torch.where(self._greedy, tempered.argmax(-1), tokens)
        logprobs = torch.log_softmax(tempered, dim=-1).gather(1, tokens[:, None])
        return tokens, logprobs[:, 0]

    def _tempered(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float() / self._divisors[:, None]


def nucleus(logits: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return the logits with all tokens outside the nucleus at minus infinity.

    Nucleus sampling: Holtzman et al. 2020, arXiv:1904.09751.

    Args:
        logits: [B, V] float32.
        top_ps: [B] float64 in (0, 1]; 1 leaves a row as it is.

    Returns:
        [B, V]: keeps the fewest tokens whose probabilities reach `top_ps`; lower token ids win ties.

    Example:
        Probabilities (0.2, 0.5, 0.3): 0.6 keeps tokens 1 and 2, 0.5 keeps token 1.
    """
    ordered, places = torch.softmax(logits.double(), dim=-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    left_out = (before >= top_ps[:, None]) & (top_ps < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(left_out).scatter_(1, places, left_out), -torch.inf)


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
    # The product may round up to the total, which no cumulative probability exceeds.
    below_total = torch.nextafter(cumulative[:, -1], torch.zeros_like(uniforms))
    thresholds = torch.minimum(uniforms * cumulative[:, -1], below_total)
    return torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]


def _entropy(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**64

"""Detects ranks that compute slower than the others.

Ranks wait for one another in every layer, so one slow rank prolongs every phase of every rank, and phase times do not
show which it is. Each rank therefore times the same small computation once per step, outside all collectives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

import torch

# About 50 ms on one CPU core, a few ms on a GPU: longer than a scheduler's time slice.
PROBE_SIZE, PROBE_REPEATS = 256, 160
# Two processes that share a core halve each other's speed; this threshold is higher.
SLOW_FACTOR = 3.0
# One slow probe may be chance, even on a fast rank: another process had the core.
STEPS = 3


def probe_seconds() -> float:
    """Return the seconds that a small fixed computation takes on this rank; it uses no random numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device)
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(PROBE_REPEATS):
        torch.mm(matrix, matrix)
    _wait_for(device)
    return time.perf_counter() - started


class SlowRanks:
    """Judges the probes of all ranks, step by step."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=STEPS)

    def observe(self, seconds: Sequence[float]) -> dict[int, float]:
        """Return slow ranks, by their median of the last steps, with their slowdown relative to the others.

        Args:
            seconds: Each rank's probe time in this step.

        Example:
            Probes of 1, 1, 5 and 1 seconds in two of three steps: {2: 5.0} after the third.
        """
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return {}
        own = [median(probes) for probes in zip(*self._steps, strict=True)]
        usual = median_low(own)  # with two ranks, the faster one's
        return {rank: value / usual for rank, value in enumerate(own) if value > SLOW_FACTOR * usual}


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

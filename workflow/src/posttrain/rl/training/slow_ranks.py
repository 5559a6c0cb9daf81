"""Which rank computes slower than the others.

Ranks wait for one another in every layer, so that a slow one makes all phases of all ranks long, and no phase's time
tells which it is. Each rank therefore times the same small computation once a step, outside of all waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

import torch

# About 50 ms of one CPU core, a few ms of a GPU: longer than the slices in which a system shares a core out.
PROBE_SIZE, PROBE_REPEATS = 256, 160
# Two processes that share a core make each other twice as slow; this is more than that.
SLOW_FACTOR = 3.0
# One slow probe may be chance, and a fast rank's one too: another process had the core.
STEPS = 3


def probe_seconds() -> float:
    """Return the seconds of a small fixed computation on this rank; it uses no random numbers."""
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
        """Return the ranks whose median of the last steps is slow, with how many times that of the others they took.

        Args:
            seconds: Of each rank's probe in this step.

        Example:
            Probes of 1, 1, 5 and 1 seconds in two of three steps: {2: 5.0} after the third.
        """
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return {}
        own = [median(probes) for probes in zip(*self._steps, strict=True)]
        usual = median_low(own)  # of two ranks, the faster one's
        return {rank: value / usual for rank, value in enumerate(own) if value > SLOW_FACTOR * usual}


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

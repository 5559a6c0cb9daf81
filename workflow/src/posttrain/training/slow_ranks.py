"""Which rank computes slower than the others.

Ranks wait for one another in every layer, so that a slow one makes all phases of all ranks long, and no phase's time
tells which it is. Each rank therefore times the same small computation once a step, outside of all waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median_low

import torch

# About 50 ms of one CPU core, a few ms of a GPU: longer than the slices in which a system shares a core out.
PROBE_SIZE, PROBE_REPEATS = 256, 160
SLOW_FACTOR = 3.0
# One slow probe may be chance: another process had the core.
STEPS_IN_A_ROW = 3


def probe_seconds() -> float:
    """Return how long the small computation takes on this rank; it uses no random numbers."""
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
        self._times_in_a_row: dict[int, int] = {}

    def look(self, seconds: Sequence[float]) -> dict[int, float]:
        """Return the ranks that were slow in the last steps, with how many times the median they took.

        Args:
            seconds: Of each rank's probe in this step.

        Example:
            Probes of 1, 1, 5 and 1 seconds in three steps: {2: 5.0} after the third.
        """
        usual = median_low(seconds)  # of two ranks, the faster one's
        slow = {rank: value / usual for rank, value in enumerate(seconds) if value > SLOW_FACTOR * usual}
        self._times_in_a_row = {rank: self._times_in_a_row.get(rank, 0) + 1 for rank in slow}
        return {rank: factor for rank, factor in slow.items() if self._times_in_a_row[rank] >= STEPS_IN_A_ROW}


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

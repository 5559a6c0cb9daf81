"""How long each phase of a step took, and its memory at its fullest.

Which model is awake in which phase is the table of `planner.sizing.phases`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.observability.rank_progress import report_progress
from posttrain.planner.sizing.phases import LIKE_OTHERS, PHASES
from posttrain.training.utilisation import PeakMemory


class PhaseClock:
    """Takes the time of each phase of one step, and lets the node's supervisor know where this rank is.

    Args:
        step: Number of the step, from 0.
    """

    def __init__(self, step: int = 0) -> None:
        self._step = step
        self._started = time.perf_counter()
        self._memory = PeakMemory()
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Spend the block's time in a phase of the table."""
        assert name in PHASES or name in LIKE_OTHERS, f"{name} is not a phase: {list(PHASES)}"
        report_progress(self._step, name)
        started = time.perf_counter()
        self._memory.reset()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), self._memory.gib())

    def metrics(self) -> dict[str, float]:
        """Return `perf/{phase}_seconds` of every phase that ran, and `perf/step_seconds`."""
        named = {f"perf/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return {**named, "perf/step_seconds": time.perf_counter() - self._started}

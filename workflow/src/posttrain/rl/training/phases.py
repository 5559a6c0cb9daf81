"""Times the phases of a step and measures their peak memory.

The table of `plan.sizing.phases` says which model is awake in which phase; with colocation it is awake before the
phase's block begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.plan.sizing.phases import ASLEEP, LIKE_OTHERS, PHASES
from posttrain.report.rank_progress import report_progress
from posttrain.rl.training.utilisation import PeakMemory


class PhaseClock:
    """Times each phase of one step, and reports this rank's phase to the node's supervisor.

    Args:
        step: Number of the step, from 0.
        enter: Called with the name of each phase to offload and reload models; None without colocation.
    """

    def __init__(self, step: int = 0, enter: Callable[[str], None] | None = None) -> None:
        self._step, self._enter = step, enter
        self._started = time.perf_counter()
        self._memory = PeakMemory()
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase."""
        assert name in PHASES or name in LIKE_OTHERS, f"{name} is not a phase: {list(PHASES)}"
        report_progress(self._step, name)
        if self._enter:
            with self._timed(ASLEEP.name):
                self._enter(name)
        self._memory.reset()
        try:
            with self._timed(name):
                yield
        finally:
            self.peak_gib[name] = max(self.peak_gib.get(name, 0.0), self._memory.gib())

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Return `perf/{phase}_seconds` for every phase that ran, and `perf/step_seconds`."""
        named = {f"perf/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return {**named, "perf/step_seconds": time.perf_counter() - self._started}

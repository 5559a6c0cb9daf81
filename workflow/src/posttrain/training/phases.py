"""The phases of a step: which of the two models is awake in each, and how long each took.

One table, used by the loop (to refuse work in the wrong phase and to take the time) and by the planner (to budget
memory). On one machine without GPUs nothing is put to sleep: both models stay in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Args:
        name: Its time is the metric `perf/{name}_seconds`.
        engines_awake: Engine weights and KV cache are in GPU memory.
        trainer_awake: The trainer's weights are in GPU memory.
        optimizer_awake: Gradients and optimizer state are too.
    """

    name: str
    engines_awake: bool
    trainer_awake: bool
    optimizer_awake: bool


PHASES = {
    phase.name: phase
    for phase in (
        Phase("rollout", engines_awake=True, trainer_awake=False, optimizer_awake=False),
        Phase("old_logprobs", engines_awake=False, trainer_awake=True, optimizer_awake=False),
        Phase("mismatch", engines_awake=False, trainer_awake=True, optimizer_awake=False),
        Phase("train", engines_awake=False, trainer_awake=True, optimizer_awake=True),
        Phase("weight_sync", engines_awake=True, trainer_awake=True, optimizer_awake=False),
        Phase("save", engines_awake=False, trainer_awake=True, optimizer_awake=True),
    )
}


class PhaseClock:
    """Takes the time of each phase of one step."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Spend the block's time in a phase of the table."""
        assert name in PHASES, f"{name} is not a phase: {list(PHASES)}"
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Return `perf/{phase}_seconds` of every phase that ran, and `perf/step_seconds`."""
        named = {f"perf/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return {**named, "perf/step_seconds": time.perf_counter() - self._started}

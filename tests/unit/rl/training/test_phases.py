"""The table of phases, and the clock that takes their times."""

from __future__ import annotations

import time

import pytest

from posttrain.plan.sizing.phases import ENGINE_CACHE, ENGINE_WEIGHTS, OPTIMIZER, PHASES, TRAINER
from posttrain.report.metrics import METRICS
from posttrain.rl.training.phases import PhaseClock


def test_every_phase_has_its_metric() -> None:
    for name in PHASES:
        assert METRICS[f"perf/{name}_seconds"].is_timing
        assert METRICS[f"perf/{name}_peak_gib"].is_timing


def test_optimizer_and_engines_are_never_awake_together() -> None:
    """Both at once is what memory has no room for."""
    assert not [phase.name for phase in PHASES.values() if {ENGINE_WEIGHTS, OPTIMIZER} <= phase.awake]
    assert not [phase.name for phase in PHASES.values() if {ENGINE_CACHE, TRAINER} <= phase.awake]
    assert not [phase.name for phase in PHASES.values() if OPTIMIZER in phase.awake and TRAINER not in phase.awake]


def test_times_of_a_phase_add_up() -> None:
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("train"):
            time.sleep(0.02)
    with clock.phase("save"):
        pass
    metrics = clock.metrics()
    assert metrics.keys() == {"perf/train_seconds", "perf/save_seconds", "perf/step_seconds"}
    assert clock.peak_gib.keys() == {"train", "save"}
    assert 0.04 <= metrics["perf/train_seconds"] <= metrics["perf/step_seconds"]


def test_a_phase_that_fails_has_its_time_too() -> None:
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock.phase("rollout"):
        raise RuntimeError("an engine died")
    assert "rollout" in clock.seconds


def test_work_outside_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="lunch"), PhaseClock().phase("lunch"):
        pass

"""When a job that is about to end is told to save."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.launch.time_to_save import MEASURED_FACTOR, TimeToSave

CONFIG_DIR = Path(__file__).parents[3] / "config"


def time_to_save(model: str, **more: object) -> TimeToSave:
    return TimeToSave(resolve({"model": model, "site": "example_slurm", **more}, CONFIG_DIR).config)


def test_what_the_site_asks_for_is_the_least() -> None:
    assert time_to_save("tiny", set="site.slurm.signal_seconds=300").seconds == 300


def test_a_plan_with_longer_steps_saves_sooner() -> None:
    """GLM-5 on 32 nodes: 814 s of a step and 520 s of a save, by the plan."""
    assert time_to_save("glm5", nodes=32, set="site.slurm.signal_seconds=600").seconds == pytest.approx(1335, abs=20)


def test_steps_that_take_longer_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = time_to_save("tiny", set="site.slurm.signal_seconds=300")
    for step, seconds in ((3, 250.0), (4, 0.0), (4, 400.0), (5, 10.0)):
        found.look(step)
        now += seconds
    assert found.seconds == MEASURED_FACTOR * 400

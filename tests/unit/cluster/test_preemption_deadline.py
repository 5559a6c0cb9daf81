"""When a job that is about to end is told to save."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from posttrain.cluster.preemption_deadline import MEASURED_FACTOR, PreemptionDeadline
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


def time_to_save(checkpoints: Path, model: str, **more: object) -> PreemptionDeadline:
    return PreemptionDeadline(
        resolve({"model": model, "site": "example_slurm", **more}, CONFIG_DIR).config, checkpoints
    )


def test_what_the_site_asks_for_is_the_least(tmp_path: Path) -> None:
    assert time_to_save(tmp_path, "tiny", set="site.slurm.signal_seconds=300").seconds == 300


def test_a_plan_with_longer_steps_saves_sooner(tmp_path: Path) -> None:
    """GLM-5 on 32 nodes: 559 s of a step and 520 s of a save, by the plan."""
    found = time_to_save(tmp_path, "glm5", nodes=32, set="site.slurm.signal_seconds=600")
    assert found.seconds == pytest.approx(1080, abs=20)


def test_steps_and_saves_that_take_longer_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest step of this attempt and the longest save of the run: one need not have held the other."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = time_to_save(tmp_path, "tiny", set="site.slurm.signal_seconds=300")
    committed(tmp_path, finished=3, seconds=100)
    for step, seconds in ((3, 250.0), (4, 0.0), (4, 400.0)):
        found.observe(step)
        now += seconds
    assert found.seconds == MEASURED_FACTOR * (250 + 100)
    committed(tmp_path, finished=4, seconds=60)
    found.observe(5)
    assert found.seconds == MEASURED_FACTOR * (400 + 100)


def committed(checkpoints: Path, finished: int, seconds: float) -> None:
    """Leave a checkpoint that took so long from its first file to its last."""
    folder = checkpoints / f"step_{finished:06d}"
    folder.mkdir()
    for name, written in (
        ("common.pt", 5000.0),
        ("__0_0.distcp", 5000.0 + seconds / 2),
        ("manifest.json", 5000 + seconds),
    ):
        (folder / name).touch()
        os.utime(folder / name, (written, written))

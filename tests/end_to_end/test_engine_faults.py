"""Engines that end within a rollout: others are not disturbed, the step goes on, and the run has the same bits."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.support.interruptions import (
    ENGINE,
    Driver,
    assert_same_training,
    attempts_of,
    find_processes,
    start,
)
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow
IN_FIRST_ROLLOUT = "rollouts/step_000000/chunk_0000.json"
NUM_KILLS, NUM_STEPS = 25, 16


def kill_an_engine(workflow: WorkflowFolder, index: int = 0) -> bool:
    """End an engine as the system does it; tells whether there was one."""
    found = sorted(find_processes(workflow, ENGINE), key=lambda process: process.pid)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        found[index % max(1, len(found))].send_signal(signal.SIGKILL)
        return True
    return False


def kill_within(driver: Driver, point: str) -> None:
    """End the one engine as soon as a file of the training is there: another chunk of the rollout follows."""
    driver.wait_until(lambda: bool(find_processes(driver.workflow, ENGINE)))
    (engine,) = find_processes(driver.workflow, ENGINE)
    file = driver.workflow.run_folder / "train" / point
    while not file.exists():
        time.sleep(0.001)
    engine.send_signal(signal.SIGKILL)


def finish_at_once(driver: Driver) -> str:
    code, output = driver.finish(900)
    assert code == 0, output[-4000:]
    return output


def starts_of(workflow: WorkflowFolder, engine: int = 0) -> int:
    """Return how often an engine was ready in the first attempt."""
    return (workflow.run_folder / f"train/attempts/001/engine{engine}.log").read_text().count("ready on http")


@pytest.mark.parametrize("sleep", ["never", pytest.param("always", marks=pytest.mark.faults("slow"))])
def test_an_engine_that_ends_in_a_rollout_is_replaced(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder, sleep: str
) -> None:
    workflow.settings |= {"engine.sleep": sleep}
    driver = start(workflow, "train_grpo")
    kill_within(driver, IN_FIRST_ROLLOUT)
    finish_at_once(driver)
    assert_same_training(workflow, undisturbed)
    assert [attempt["reason"] for attempt in attempts_of(workflow)] == ["done"]
    assert starts_of(workflow) == 2


@pytest.mark.faults("training")
def test_engines_that_end_again_and_again(workflow: WorkflowFolder, tmp_path: Path) -> None:
    """At random moments of rollouts, one of two engines each time; whoever is hit outside of one ends the attempt."""
    settings = {"engine.num_engines": 2, "training.num_steps": NUM_STEPS, "engine.sleep": "always"}
    settings |= {"launch.max_idle_attempts": 20, "engine.groups_per_request": 1}
    straight = WorkflowFolder(tmp_path / "straight", workflow.store, workflow.settings | settings)
    straight.run("train_grpo", timeout=900)
    workflow.settings |= settings
    driver, chance, num_killed = start(workflow, "train_grpo"), random.Random(1), 0
    driver.wait_for_file(IN_FIRST_ROLLOUT)
    while num_killed < NUM_KILLS and driver.process.poll() is None:
        time.sleep(chance.uniform(0.5, 8))
        num_killed += kill_an_engine(workflow, chance.randrange(2))
    finish_at_once(driver)
    assert_same_training(workflow, straight)
    assert num_killed >= NUM_KILLS // 2

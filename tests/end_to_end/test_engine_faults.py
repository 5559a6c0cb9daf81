"""Engines that end within a rollout: others are not disturbed, the step goes on, and the run has the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.support.fault_parts import Count
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
IN_FIRST_ROLLOUT = "rollouts/step_000000/chunk_*.json"
NUM_STEPS, NUM_CHUNKS = 16, 16
# A rollout of many requests, of which most are still to come when the first is answered.
MANY_CHUNKS = {
    "engine.groups_per_request": 1,
    "rollout.rollout_batch_size": NUM_CHUNKS,
    "training.global_batch_size": 8 * NUM_CHUNKS,
}
# Of engines that died within a rollout and were replaced in it.
NUM_FAULTS = int(os.environ.get("POSTTRAIN_ENGINE_FAULTS", "200"))
WAIT_AND_KILL = """
import contextlib, glob, os, signal, sys, time
with contextlib.suppress(PermissionError):
    os.nice(-10)
while not glob.glob(sys.argv[1]):
    time.sleep(0.001)
os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


def engines_of(driver: Driver) -> list[psutil.Process]:
    """Return both engines, as soon as there are two."""
    driver.wait_until(lambda: len(find_processes(driver.workflow, ENGINE)) == 2)
    return sorted(find_processes(driver.workflow, ENGINE), key=lambda process: process.pid)


def kill_within(driver: Driver, point: str) -> None:
    """End the one engine as soon as the training has a file of a pattern: other chunks of the rollout follow.

    A process of its own does it: other threads of this one may be busy for as long as the other chunks take.
    """
    driver.wait_until(lambda: bool(find_processes(driver.workflow, ENGINE)))
    (engine,) = find_processes(driver.workflow, ENGINE)
    file = driver.workflow.run_folder / "train" / point
    subprocess.run([sys.executable, "-S", "-c", WAIT_AND_KILL, str(file), str(engine.pid)], check=True, timeout=300)


def finish_at_once(driver: Driver) -> str:
    code, output = driver.finish(900)
    assert code == 0, output[-4000:]
    return output


def starts_of(workflow: WorkflowFolder, engine: int = 0) -> int:
    """Return how often an engine was ready in the first attempt."""
    return (workflow.run_folder / f"train/attempts/001/engine{engine}.log").read_text().count("ready on http")


@pytest.mark.faults("slow")
@pytest.mark.parametrize("sleep", ["never", "always"])
def test_an_engine_that_ends_in_a_rollout_is_replaced(workflow: WorkflowFolder, tmp_path: Path, sleep: str) -> None:
    workflow.settings |= MANY_CHUNKS | {"training.num_steps": 2, "engine.sleep": sleep}
    straight = WorkflowFolder(tmp_path / "straight", workflow.store, workflow.settings)
    straight.run("train", timeout=900)
    driver = start(workflow, "train")
    kill_within(driver, IN_FIRST_ROLLOUT)
    finish_at_once(driver)
    assert_same_training(workflow, straight)
    assert [attempt["reason"] for attempt in attempts_of(workflow)] == ["done"]
    assert starts_of(workflow) == 2


@pytest.mark.faults("training")
def test_an_engine_that_hangs_in_a_rollout_is_replaced(workflow: WorkflowFolder, tmp_path: Path) -> None:
    """One of two stands still, and takes connections; one attempt has the bits of a run in which nobody does."""
    settings = {"engine.num_engines": 2, "engine.groups_per_request": 1, "training.num_steps": 4}
    straight = WorkflowFolder(tmp_path / "straight", workflow.store, workflow.settings | settings)
    straight.run("train", timeout=900)
    workflow.settings |= settings | {"engine.request_timeout_seconds": 15}
    driver = start(workflow, "train")
    _, hung = engines_of(driver)
    driver.wait_until(lambda: [*(workflow.run_folder / "train").glob(IN_FIRST_ROLLOUT)])
    hung.send_signal(signal.SIGSTOP)
    finish_at_once(driver)
    assert_same_training(workflow, straight)
    assert [attempt["reason"] for attempt in attempts_of(workflow)] == ["done"]
    assert sorted(starts_of(workflow, engine) for engine in (0, 1)) == [1, 2]
    (log,) = workflow.run_folder.glob("train/attempts/*/node-*.log")
    assert log.read_text().count("does not answer any more: it is ended") == 1


@pytest.mark.faults("rollouts")
@pytest.mark.timeout(3600)
def test_engines_that_end_again_and_again(workflow: WorkflowFolder, count: Count, tmp_path: Path) -> None:
    """One of two engines in every rollout, at random moments of it; one that is hit behind it ends the attempt."""
    settings = MANY_CHUNKS | {"engine.num_engines": 2, "training.num_steps": NUM_STEPS, "engine.sleep": "always"}
    settings |= {"launch.max_idle_attempts": 20, "logging.keep_rollouts": "true"}
    straight = WorkflowFolder(tmp_path / "straight", workflow.store, workflow.settings | settings)
    straight.run("train", timeout=900)
    while sum(row["replaced"] for row in count.rows) < NUM_FAULTS:
        number = len(count.rows)
        run = WorkflowFolder(tmp_path / f"run_{number}", workflow.store, workflow.settings | settings)
        kill_in_every_rollout(run, random.Random(number))
        assert_same_training(run, straight)
        logs = run.run_folder.glob("train/attempts/*/node-*.log")
        replaced = sum(log.read_text().count("it starts again") for log in logs)
        assert replaced, "nobody was hit within a rollout"
        count.add([{"killed": NUM_STEPS, "replaced": replaced, "attempts": len(attempts_of(run))}])


def kill_in_every_rollout(run: WorkflowFolder, chance: random.Random) -> None:
    driver = start(run, "train")
    driver.wait_until(lambda: bool(find_processes(run, ENGINE)))
    rollouts = run.run_folder / "train" / "rollouts"
    for step in range(NUM_STEPS):
        few = chance.randrange(1, NUM_CHUNKS // 2)
        engines = engines_of(driver)  # now, because to find them may take longer than a rollout
        while len(list((rollouts / f"step_{step:06d}").glob("chunk_*.json"))) < few and driver.process.poll() is None:
            time.sleep(0.001)
        with contextlib.suppress(psutil.NoSuchProcess):
            chance.choice(engines).send_signal(signal.SIGKILL)
    finish_at_once(driver)

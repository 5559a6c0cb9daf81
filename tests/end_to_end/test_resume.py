"""Each kind of interruption once: the same command again, and the run is bit for bit the one that nobody disturbed.

Points are conditions that can be seen from outside (a file appears), never a time. The full counts at random points are
in test_faults.py, damage to single steps is in tests/scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from tests.end_to_end.test_turns import TURNS, check_turns
from tests.support.interruptions import (
    ENGINE,
    NUM_JOBS,
    OUTPUTS,
    SUPERVISOR,
    TRAINER,
    Driver,
    assert_gone,
    assert_same_training,
    attempts_of,
    check_claims,
    files_made,
    find_processes,
    finished_jobs,
    keep_rollouts,
    kill_at_times,
    seconds_by_rule,
    start,
    training_state,
)
from tests.support.replaying import assert_steps_are_repeatable
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.config.schema import Launch

pytestmark = pytest.mark.slow

IN_FIRST_ROLLOUT = "rollouts/step_000000/chunk_0000.json"
# Both chunks are there: log-probabilities, update and weight sync follow.
IN_AN_UPDATE = "rollouts/step_000001/chunk_0001.json"
IN_A_CHECKPOINT = "checkpoints/step_000004.partial"
FIRST_CHECKPOINT = "checkpoints/step_000002"


def start_until(workflow: WorkflowFolder, point: str, *targets: str) -> Driver:
    """Start the workflow and return when its training has reached a point."""
    driver = start(workflow, *(targets or ("train",)))
    driver.wait_for_file(point)
    return driver


def finish(workflow: WorkflowFolder, *targets: str) -> str:
    """Give the same command again, to the end."""
    code, output = start(workflow, *targets).finish()
    assert code == 0, output[-4000:]
    return output


def end(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def bystander() -> Iterator[subprocess.Popen]:
    """Somebody else's server, by its name one of ours; ending ours by name would end it."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", ENGINE, "sglang::scheduler", TRAINER]
    process = subprocess.Popen(["sglang", *command[1:]], executable=sys.executable)
    try:
        yield process
        assert process.poll() is None, "a process that is not ours was ended"
    finally:
        process.kill()
        process.wait()


def kill_drivers(workflow: WorkflowFolder, target: str, points: Sequence[str]) -> None:
    """Kill a driver at each point, and give the command once more."""
    made_once = {path: path.read_text() for path in workflow.store.rglob("*.history.jsonl")}
    for point in points:
        driver = start_until(workflow, point, target)
        driver.end(signal.SIGKILL)
        assert_gone(workflow)
        check_claims(workflow)
    finish(workflow, target)
    assert {path: path.read_text() for path in made_once} == made_once, "what is made again has another row"
    assert finished_jobs(workflow)["train"] == 1
    epochs = [json.loads(p.read_text())["epoch"] for p in sorted(workflow.run_folder.glob("train/lease/epoch-*.json"))]
    assert epochs == [*range(1, len(points) + 2)]
    assert "Nothing to be done" in workflow.run(target)


# A trainer and an engine start twice, and a trainer once more.
def test_a_killed_driver(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """Trainer and engine take turns, which changes no bit, either; the last steps are trained again afterwards."""
    workflow.settings |= TURNS | {"logging.keep_rollouts": "true"}
    kill_drivers(workflow, "train", [IN_AN_UPDATE])
    assert_same_training(workflow, undisturbed)
    check_turns(workflow)
    assert_steps_are_repeatable(workflow)


@pytest.mark.faults("slow")
def test_a_driver_of_the_whole_chain_is_killed_three_times(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder
) -> None:
    kill_drivers(workflow, "all", [IN_FIRST_ROLLOUT, IN_AN_UPDATE, IN_A_CHECKPOINT])
    assert_same_training(workflow, undisturbed)
    assert workflow.summary["final_weights_sha256"] == undisturbed.summary["final_weights_sha256"]
    assert set(finished_jobs(workflow).values()) == {1, 2}, "evaluation and staging have two jobs, all others one"


@pytest.mark.faults("training")
def test_a_killed_process_of_training(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """The supervisor restarts what died; when it dies itself, all of its processes go and Snakemake says so.

    An engine that died in a rollout is started again, and nothing else.
    """
    with bystander():
        driver = start_until(workflow, IN_FIRST_ROLLOUT)
        end(find_processes(workflow, ENGINE)[0])
        driver.wait_for_file(FIRST_CHECKPOINT)
        end(find_processes(workflow, TRAINER)[0])
        driver.wait_for_file("attempts/002/trainer0.log")
        (supervisor,) = find_processes(workflow, SUPERVISOR)
        driver.wait_until(lambda: len(find_processes(workflow, TRAINER)) == 1)
        end(supervisor)
        code, output = driver.finish()
        assert code != 0
        assert "Error in rule train" in output
        assert_gone(workflow)
        finish(workflow, "train")
        assert_gone(workflow)
    assert_same_training(workflow, undisturbed)
    killed, ended, last = attempts_of(workflow)
    assert "trainer rank 0 was ended by SIGKILL" in killed["reason"]
    assert (ended["attempt"], ended["reason"]) == (2, "the supervisor was killed")
    assert (last["attempt"], last["epoch"], last["reason"]) == (3, 2, "done")


@pytest.mark.faults("slow")
def test_signals_to_the_driver(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """A closed terminal and Ctrl-C end everything at once; SIGTERM lets the running job finish, as Snakemake has it."""
    for point, number in ((IN_FIRST_ROLLOUT, signal.SIGHUP), (IN_AN_UPDATE, signal.SIGINT)):
        driver = start_until(workflow, point)
        os.killpg(driver.process.pid, number)
        assert driver.finish(timeout=60)[0] != 0
        assert_gone(workflow)
    driver = start_until(workflow, FIRST_CHECKPOINT, "finalize_export_hf")
    driver.process.send_signal(signal.SIGTERM)
    driver.finish()
    assert_gone(workflow)
    assert (workflow.run_folder / "train/done.json").exists()
    assert not (workflow.run_folder / "hf.receipt.json").exists()
    finish(workflow, "finalize_export_hf")
    assert_same_training(workflow, undisturbed)
    assert finished_jobs(workflow)["train"] == 1


@pytest.mark.faults("slow")
def test_a_training_that_is_asked_to_end(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """It saves at the end of its step, due or not; no rollout follows that could hide the save."""
    driver = start_until(workflow, IN_FIRST_ROLLOUT)
    find_processes(workflow, TRAINER)[0].send_signal(signal.SIGUSR1)
    code, output = driver.finish()
    assert code != 0
    assert output.index("checkpoint after step 1 committed") < output.index("asked to end: step 1 is saved")
    assert [path.name for path in (workflow.run_folder / "train/checkpoints").glob("step_*")] == ["step_000001"]
    assert "resuming after step 1" in finish(workflow, "train")
    assert_same_training(workflow, undisturbed)


@pytest.mark.faults("slow")
def test_what_a_power_cut_leaves(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """Half a checkpoint, torn lines, no node-local copy: the last complete checkpoint is used, and the rest is said.

    With a checkpoint nothing of the copy is needed: engines get their weights from the trainer.
    """
    start_until(workflow, FIRST_CHECKPOINT).end(signal.SIGKILL)
    assert_gone(workflow)
    train = workflow.run_folder / "train"
    half = train / "checkpoints/step_000003.partial"
    shutil.copytree(train / FIRST_CHECKPOINT, half)
    (shard,) = half.glob("*.distcp")
    os.truncate(shard, shard.stat().st_size // 2)
    for name in ("metrics.jsonl", "attempts.jsonl"):
        with open(train / name, "a") as file:
            file.write('{"step": 3, "rew')
    shutil.rmtree(workflow.folder / "node_local")
    output = finish(workflow, "train")
    assert f"removing {half}" in output
    assert not (workflow.folder / "node_local").exists()
    (engine,) = train.glob("attempts/002/engine0.log")
    assert f"no weights are read from {workflow.store}" in engine.read_text()
    assert not half.exists()
    assert_same_training(workflow, undisturbed)
    assert [row["reason"] for row in attempts_of(workflow)] == ["the supervisor was killed", "done"]


@pytest.mark.faults("slow")
def test_a_damaged_checkpoint_is_named_and_not_used(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    """A crash that repeats itself ends, with the reason; the remedy that is given works."""
    start_until(workflow, FIRST_CHECKPOINT).end(signal.SIGKILL)
    assert_gone(workflow)
    newest = workflow.run_folder / "train" / FIRST_CHECKPOINT
    (shard,) = newest.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of a tensor or between two: nothing of torch's would notice
    shard.write_bytes(content)
    code, output = start(workflow, "train").finish()
    assert code != 0
    assert f"training ended {Launch().max_idle_attempts} times without progress" in output
    assert f"{shard}: content differs" in output
    assert f"remedy: rm -r {newest}" in output
    assert len(attempts_of(workflow)) == Launch().max_idle_attempts
    shutil.rmtree(newest)
    finish(workflow, "train")
    assert_same_training(workflow, undisturbed)


@pytest.mark.faults("slow")
def test_an_engine_that_hangs(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> None:
    workflow.settings |= {"engine.request_timeout_seconds": 5}
    driver = start_until(workflow, IN_FIRST_ROLLOUT)
    (engine,) = find_processes(workflow, ENGINE)
    engine.suspend()
    code, output = driver.finish()
    assert code == 0, output[-4000:]
    assert not engine.is_running()
    assert "no answer within 5 s" in attempts_of(workflow)[0]["reason"]
    assert_same_training(workflow, undisturbed)


@pytest.mark.faults("slow")
def test_six_steps_equal_three_and_the_rest(store: Path, tmp_path: Path) -> None:
    """Weights, optimizer, learning rate, prompts, responses and metrics of each step, in one go and in two."""
    settings = FAST | {"training.num_steps": 6, "trainer.save_interval": 3, "optimizer.lr_warmup_steps": 5}
    straight, pieces = (WorkflowFolder(tmp_path / name, store, dict(settings)) for name in ("straight", "pieces"))
    driver = start(straight, "train")
    keep_rollouts(driver, tmp_path / "rollouts of one")
    assert driver.finish()[0] == 0, driver.output[-4000:]
    driver = start(pieces, "train")
    keep_rollouts(driver, tmp_path / "rollouts of two", until="checkpoints/step_000003")
    driver.end(signal.SIGKILL)
    assert_gone(pieces)
    driver = start(pieces, "train")
    keep_rollouts(driver, tmp_path / "rollouts of two")
    said = driver.output
    assert 0 < said.index("resuming after step 3") < said.index("the trainer has its weights; engines were ready")
    assert "checkpoint after step 6 committed, written in" in said
    assert_same_training(pieces, straight)
    one, two = contents(tmp_path / "rollouts of one"), contents(tmp_path / "rollouts of two")
    assert len(one) == 12, "two requests in each of six steps"
    assert one == two
    for step in (3, 6):
        ours, theirs = training_state(pieces, step), training_state(straight, step)
        assert not [key for key in theirs if not torch.equal(ours[key], theirs[key])], step


@pytest.mark.faults("slow")
def test_every_other_rule_killed_once(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    """At a point of its own, in the time that it took undisturbed; making the model is in test_faults.py alone."""
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store")
    shutil.copytree(undisturbed.store / "made", workflow.store / "made")
    seconds = seconds_by_rule(undisturbed.store.parent / "first/logs") | seconds_by_rule(undisturbed.folder / "logs")
    rng = random.Random(1)
    points = {
        # Early enough to hit on a machine that is faster now; test_faults.py kills anywhere.
        rule: [rng.uniform(0, 0.3 * length) for _ in range(NUM_JOBS.get(rule, 1))]
        for rule, length in sorted(seconds.items())
        if rule in OUTPUTS.keys() - {"make_tiny_model"}
    }
    kills = kill_at_times(workflow, points, "all")
    assert {kill.rule for kill in kills} == points.keys(), "every rule was killed"
    assert check_claims(workflow)
    assert files_made(workflow).items() <= files_made(undisturbed).items(), "the store serves other tests too"
    assert_same_training(workflow, undisturbed)
    assert workflow.summary["final_weights_sha256"] == undisturbed.summary["final_weights_sha256"]
    finished = finished_jobs(workflow)
    assert {rule: finished[rule] for rule in points} == {rule: len(times) for rule, times in points.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.faults("slow")
def test_a_run_that_replays_routes_is_killed_between_a_file_of_them_and_its_chunk(
    workflow: WorkflowFolder, tmp_path: Path
) -> None:
    workflow.settings |= {"algorithm.routing_replay": "true"}
    straight = WorkflowFolder(tmp_path / "straight", workflow.store, dict(workflow.settings))
    straight.run("train")
    driver = start_until(workflow, "rollouts/step_000001/chunk_0000.routes")
    driver.end(signal.SIGKILL)
    assert_gone(workflow)
    workflow.run("train")
    assert_same_training(workflow, straight)
    assert attempts_of(workflow)[-1]["attempt"] == 2

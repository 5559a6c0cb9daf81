import dataclasses
import json
import os
import subprocess
import sys

from tests.support.begun_runs import begin_run, workflow_of
from tests.support.forked_programs import run_posttrain
from tests.support.resolved_words import resolved_words

from posttrain.cluster.rollout_queue import read_queue
from posttrain.report.sinks import read_rows
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.store import write_text
from posttrain.store.lease import Lease
from posttrain.types import Prompt, Trajectory, TrajectoryGroup


def status(results, **more):
    words = resolved_words(workflow_of(results, **more), results.parent)
    done = run_posttrain("status", *words)
    return done.returncode, done.stdout, done.stderr


def test_it_tells_steps_speed_reward_checkpoint_and_how_the_last_attempt_ended(tmp_path):
    begin_run(tmp_path, "stopped")
    with Lease(begin_run(tmp_path, "alive").train, tmp_path / "alive/train/lease"):
        code, shown, _ = status(tmp_path)
    assert code == 0
    stopped, alive = (next(line for line in shown.splitlines() if name in line) for name in ("stopped", "alive "))
    for words in ("stopped", "6 of 40", "250", "0.35", "step 4, ", "trainer rank 0 was ended"):
        assert words in stopped
    assert "training" in alive
    assert f"process {os.getpid()} on " in alive


def test_one_run_is_shown_alone_and_an_unknown_one_is_refused(tmp_path):
    begin_run(tmp_path, "first")
    begin_run(tmp_path, "second")
    assert "second" not in status(tmp_path, run="first")[1]
    code, _, error = status(tmp_path, run="frist")
    assert code == 1
    assert "did you mean 'first'?" in error


def test_it_shows_the_queue_of_a_run_that_has_one(tmp_path):
    begin_run(tmp_path, "synchronous")
    paths = begin_run(tmp_path, "ahead")
    queue = {"queue/groups_running": 3, "queue/age_0": 0.25, "queue/age_1": 0.5, "queue/age_10": 0.25}
    rows = [row | queue | {"queue/dropped_equal_rewards": row["step"]} for row in read_rows(paths.metrics)]
    write_text(paths.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    store = QueueStore(paths.train / "rollouts")
    groups = [dataclasses.replace(some_group(), position=position) for position in range(6)]
    for group in groups:
        store.write_group(group)
    store.take(6, groups[:1], (1, [3]))
    for _ in range(2):
        (row,) = (line for line in status(tmp_path)[1].splitlines() if "0: 25%" in line)
        # Group 3 was taken, and a kill has left its file.
        expected = ["ahead", "4", "3", "0: 25%, 1: 50%, 10: 25%", "21 equal rewards"]
        assert [cell.strip() for cell in row.split("│")] == expected
    assert "groups ready" not in status(tmp_path, run="synchronous")[1]


def test_groups_are_ready_until_a_step_has_its_chunk(tmp_path):
    paths = begin_run(tmp_path, "ahead")
    store = QueueStore(paths.train / "rollouts")
    for position in range(3):
        store.write_group(dataclasses.replace(some_group(), position=position))
    queue = paths.train / "rollouts/queue"
    write_text(queue / "done_000007.json", json.dumps({"first_open": 2, "others": []}))
    assert read_queue(paths.train, [], checkpoint=6).num_ready == 3
    assert read_queue(paths.train, [], checkpoint=7).num_ready == 1
    assert read_queue(paths.train, [], checkpoint=7).num_running is None


def some_group():
    one = Trajectory.of_response((5, 6), (7,), (-0.5,), 0, prompt_id=0, reward=1.0)
    return TrajectoryGroup(Prompt(0, (), ""), (one,))


def test_a_row_that_is_being_written_does_not_count_yet(tmp_path):
    paths = begin_run(tmp_path, "alive")
    with open(paths.metrics, "a") as metrics, open(paths.attempts, "a") as attempts:
        metrics.write('{"step": 7, "roll')
        attempts.write('{"attempt": 2')
    code, shown, _ = status(tmp_path)
    assert code == 0
    assert "6 of 40" in shown


def test_a_run_whose_model_is_being_made_has_not_stopped(tmp_path):
    begin_run(tmp_path, "making")
    begin_run(tmp_path, "other")
    script, resolved = tmp_path / "make_tiny_model.py", tmp_path / "resolved.json"
    script.write_text("input()")
    resolved.write_text(json.dumps({"run": "making", "config": {"site": {"results": str(tmp_path)}}}))
    command = [sys.executable, script.name, "--resolved", resolved.name]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as step:
        making, other = (
            next(row for row in status(tmp_path)[1].splitlines() if name in row) for name in ("making", "other")
        )
        step.communicate(b"\n")
    assert "running" in making
    assert f"make_tiny_model, process {step.pid}" in making
    assert "stopped" in other
    assert "running" not in status(tmp_path)[1], "it has ended"

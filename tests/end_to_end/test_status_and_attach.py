"""`snakemake status` while a run is alive, and `snakemake attach` to a training that lives without its driver."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.support.interruptions import (
    ENGINE,
    NODE,
    SUPERVISOR,
    TRAINER,
    assert_same_training,
    attempts_of,
    check_claims,
    find_processes,
    start,
)
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow

FIRST_CHECKPOINT = "checkpoints/step_000002"


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and time of change of everything below a folder, folders too."""
    stats = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def suspend(workflow: WorkflowFolder) -> list[psutil.Process]:
    """Suspend the processes of a training, and return them when each of their threads has stopped.

    A signal to stop is delivered when a thread leaves the kernel: until then it finishes what it writes or deletes.
    """
    kinds = (SUPERVISOR, NODE, TRAINER, ENGINE)
    processes = [process for kind in kinds for process in find_processes(workflow, kind)]
    for process in processes:
        process.suspend()
    deadline = time.monotonic() + 10
    while running := [process for process in processes if not _has_stopped(process)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)
    return processes


def _has_stopped(process: psutil.Process) -> bool:
    states = set()
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states <= {"T"}


def start_without_driver(workflow: WorkflowFolder) -> subprocess.Popen:
    """Start training as a scheduler's job whose driver has died: the rule's own command, and nobody to follow."""
    workflow.run("stage_all_nodes", "resolve_config", "approve_data")
    shown = workflow.run("train", options=["-n", "--printshellcmds"])
    (command,) = re.findall(r"POSTTRAIN_LOG=\S+ python \S*scripts/train.py .*", shown)
    environment = {**workflow.env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (workflow.folder / "logs" / "train").mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, shell=True, cwd=workflow.folder, env=environment, start_new_session=True)


# A trainer and an engine start; two others need the living run.
def test_a_living_run_tells_where_it_stands_and_takes_no_second_driver(
    store: Path, undisturbed: WorkflowFolder, tmp_path: Path
) -> None:
    """Who asks touches nothing, and who is refused changes nothing."""
    # Of its own: in the shared one other tests are at work.
    at_work = shutil.ignore_patterns("users", "*.lease", "*.tmp")
    shutil.copytree(store, tmp_path / "store", symlinks=True, ignore=at_work)
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store")
    driver = start(workflow, "train")
    driver.wait_for_file(FIRST_CHECKPOINT)
    processes = suspend(workflow)
    try:
        before = state_of(workflow.results), state_of(workflow.store)
        shown = workflow.run("status")
        assert (state_of(workflow.results), state_of(workflow.store)) == before
        trainer = find_processes(workflow, TRAINER)[0]
        for process in set(processes) - {trainer}:
            process.resume()
        # So that training is not over before the second one asks.
        assert_no_second_driver(workflow)
    finally:
        for process in processes:
            process.resume()
    run = workflow.run_folder.name
    (row,) = (line for line in shown.splitlines() if line.strip().startswith(run))
    assert re.search(r"│ training +│ +[23] of 4 │ +[\d,.]+ │ +0?[\d.]+ │ +step 2, ", row), row
    assert f"process {find_processes(workflow, SUPERVISOR)[0].pid} on " in shown
    assert driver.finish()[0] == 0, driver.output[-4000:]
    assert_same_training(workflow, undisturbed)
    assert [row["attempt"] for row in attempts_of(workflow)] == [1]
    assert check_claims(workflow)
    assert re.search(r"│ trained +│ +4 of 4 │", workflow.run("status", config={"run": run}))


def assert_no_second_driver(workflow: WorkflowFolder) -> None:
    """Ask for a training that another driver has begun."""
    code, output = workflow.attempt("train")
    assert code != 0
    (holder,) = workflow.run_folder.glob("train/lease/epoch-*.json")
    assert f"is being written by process {json.loads(holder.read_text())['pid']}" in output
    assert "Traceback" not in output


def test_a_run_that_is_not_there_is_named_with_those_that_are(workflow: WorkflowFolder) -> None:
    assert "no run in " in workflow.run("status")
    code, output = workflow.attempt("status", config={"run": "nobodys"})
    assert code != 0
    assert "run = 'nobodys'" in output
    assert "has not begun" in workflow.run("attach")
    assert not workflow.results.exists()


@pytest.mark.faults("slow")
def test_attach_waits_for_a_training_without_driver_and_snakemake_goes_on(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder
) -> None:
    job = start_without_driver(workflow)
    while not list(workflow.results.glob("*/train/rollouts/step_*/*.json")):
        assert job.poll() is None
    # The last steps take less time than the start of `snakemake`.
    processes = suspend(workflow)
    watcher = start(workflow, "attach")
    watcher.wait_until(lambda: f"attached to process {_supervisor_of(job)}" in watcher.output)
    for process in processes:
        process.resume()
    assert job.wait(60) == 0
    code, shown = watcher.finish()
    assert code == 0
    assert "is trained" in shown
    output = workflow.run()
    assert "rule train" not in output
    assert_same_training(workflow, undisturbed)
    assert workflow.summary["final_weights_sha256"] == undisturbed.summary["final_weights_sha256"]


@pytest.mark.faults("slow")
def test_attach_tells_that_a_training_has_ended_early_and_that_nothing_runs(workflow: WorkflowFolder) -> None:
    job = start_without_driver(workflow)
    while not list(workflow.results.glob(f"*/train/{FIRST_CHECKPOINT}")):
        assert job.poll() is None
    stopped = suspend(workflow)
    watcher = start(workflow, "attach")
    watcher.wait_until(lambda: "attached to" in watcher.output)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    code, output = watcher.finish()
    assert code != 0
    told = r"at step [234] of 4, its newest checkpoint at 2, has ended: it was killed"
    assert re.search(told, output), output[-2000:]
    assert "nothing trains" in workflow.run("attach")


def _supervisor_of(job: subprocess.Popen) -> int:
    """Return the id of the script that the shell runs, or has become."""
    children = psutil.Process(job.pid).children() if psutil.pid_exists(job.pid) else []
    return next((child.pid for child in children if SUPERVISOR in " ".join(child.cmdline())), job.pid)

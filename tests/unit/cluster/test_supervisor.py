"""The supervisor with real child processes: what it starts it ends, what fails it names, and it gives up in the end.

Engines are small shell scripts in the place of `engine.python`; trainer ranks are the real program, with a command line
that it answers at once. Whole trainings under the supervisor are in tests/end_to_end/test_resume.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from tests.support.rejections import rejected
from tests.support.small_job import STAYS, attempts_of, make_job, required_arguments

from posttrain.cluster import supervisor
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.nodes import ThisMachine
from posttrain.config.load import load_resolved
from posttrain.config.schema import Launch
from posttrain.errors import CheckpointError
from posttrain.store import FileRecord, Receipt, write_receipt
from posttrain.store.lease import Lease

MAX_IDLE_ATTEMPTS = Launch().max_idle_attempts
DIES = "echo cannot serve this; exit 3"
WAITS = """
import sys, time
from pathlib import Path
from posttrain.store.lease import Lease
with Lease(Path(sys.argv[1]), Path(sys.argv[1]) / "lease"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before, "the supervisor left a process behind"


def supervise(job: TrainingJob) -> None:
    supervisor.supervise(job, load_resolved(job.config_path), ThisMachine("here"))


def test_all_ranks_done_ends_the_engines(tmp_path: Path) -> None:
    supervise(make_job(tmp_path, STAYS))
    assert [(row["attempt"], row["epoch"], row["reason"]) for row in attempts_of(tmp_path)] == [(1, 1, "done")]
    assert "usage: trainer_rank.py" in (tmp_path / "attempts/001/trainer0.log").read_text()
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 2, "the first was released"


def test_another_driver_with_other_nodes_changes_nothing_of_a_job_that_runs(tmp_path: Path) -> None:
    """It writes the run's configuration anew, for two nodes, before the job's second attempt."""
    rewrites = f"echo 'nodes: 2' >> {tmp_path}/config.yaml; test -e {tmp_path}/attempts/002 && exec sleep 600; exit 1"
    supervise(make_job(tmp_path, rewrites))
    assert [row["reason"] == "done" for row in attempts_of(tmp_path)] == [False, True]


def test_a_rank_that_always_dies(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        supervise(make_job(tmp_path, STAYS, required_arguments(tmp_path)))
    message = str(raised.value)
    assert f"training ended {MAX_IDLE_ATTEMPTS} times without progress" in message
    assert "trainer rank 0 ended with exit code 1" in message
    assert f"{tmp_path / 'nothing.yaml'}" in message, "the end of the log"
    assert str(tmp_path / "attempts") in message
    assert [row["attempt"] for row in attempts_of(tmp_path)] == [1, 2, 3]


def test_an_engine_that_always_dies(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="engine 0 ended with exit code 3") as raised:
        supervise(make_job(tmp_path, DIES, arguments=required_arguments(tmp_path)))
    assert "cannot serve this" in str(raised.value)
    assert str(tmp_path / "attempts/003/engine0.log") in str(raised.value)


def test_with_a_checkpoint_engines_start_without_weights(tmp_path: Path) -> None:
    """Nothing is read or copied on the node, so files that are missing do not matter."""
    job = make_job(tmp_path, f'echo "$@" >> commands; {STAYS}')
    missing = FileRecord("model.safetensors", 1, "0" * 32)
    write_receipt(job.rollout_receipt, Receipt("finalize_rollout_fp8", (missing,), {}, {}), time.time())
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    supervise(job)
    (words,) = (tmp_path / "commands").read_text().splitlines()
    assert "--load-format dummy" in words
    assert f"--model-path {job.rollout_weights} " in words
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("work", ["step_000000/chunk", "queue/group"])
def test_progress_gives_new_attempts(tmp_path: Path, work: str) -> None:
    """Two attempts finish a chunk or a group each and die; only later ones are idle. Each has a secret of its own."""
    count = "echo $POSTTRAIN_ENGINE_SECRET >> secrets;"
    count += f"n=$(ls attempts | wc -l); mkdir -p rollouts/{Path(work).parent}"
    work = f"{count}; touch rollouts/{work}_000$((n < 3 ? n : 2)).json"
    with pytest.raises(RuntimeError, match="3 times without progress"):
        supervise(make_job(tmp_path, f"{work}; {DIES}", arguments=required_arguments(tmp_path)))
    assert len(attempts_of(tmp_path)) == 2 + MAX_IDLE_ATTEMPTS
    secrets = (tmp_path / "secrets").read_text().split()
    assert len(set(secrets)) == len(secrets) == 2 + MAX_IDLE_ATTEMPTS
    assert {len(secret) for secret in secrets} == {64}


ONE_IDLE_ATTEMPT = "launch.max_idle_attempts=1"


def test_a_new_checkpoint_is_progress(tmp_path: Path) -> None:
    """The first attempt commits one and dies; only the second, which achieves nothing, is idle."""
    work = "mkdir -p checkpoints/step_000002"
    with pytest.raises(RuntimeError, match="ended 1 times without progress"):
        supervise(make_job(tmp_path, f"{work}; {DIES}", arguments=required_arguments(tmp_path), more=ONE_IDLE_ATTEMPT))
    assert len(attempts_of(tmp_path)) == 2


class LostOnce(ThisMachine):
    """This machine, called lost at first, and there again for the next attempt."""

    is_lost = True

    def check(self, names: Sequence[str]) -> list[str]:
        lost, self.is_lost = list(names) if self.is_lost else [], False
        return lost


def test_a_lost_node_is_no_fault_of_the_run(tmp_path: Path) -> None:
    """The engine ends the node's supervisor, as a lost node ends all that runs there."""
    job = make_job(tmp_path, "kill -KILL $PPID", arguments=required_arguments(tmp_path), more=ONE_IDLE_ATTEMPT)
    with pytest.raises(RuntimeError, match="ended 1 times without progress"):
        supervisor.supervise(job, load_resolved(job.config_path), LostOnce("here"))
    gone = "the supervisor of here is gone"
    assert [row["reason"] for row in attempts_of(tmp_path)] == [f"{gone}; lost: here", gone]


def test_a_killed_attempt_is_recorded_by_the_next_supervisor(tmp_path: Path) -> None:
    """Its row as it began, and as its end the time of the last file that was written of it."""
    job = make_job(tmp_path, STAYS)
    killed = tmp_path / "attempts/001"
    killed.mkdir(parents=True)
    row = {"attempt": 1, "epoch": 4, "started_unix": 1000.0, "nodes": ["here"]}
    for name, written_unix in ((supervisor.BEGUN, 1000.5), ("trainer0.log", 1060.0)):
        (killed / name).write_text(json.dumps(row))
        os.utime(killed / name, (written_unix, written_unix))
    supervise(job)
    first, second = attempts_of(tmp_path)
    assert first == {**row, "ended_unix": 1060.0, "reason": "the supervisor was killed"}
    assert (second["attempt"], second["reason"]) == (2, "done")
    assert not list(tmp_path.glob(f"attempts/*/{supervisor.BEGUN}"))


def test_attempts_go_on_counting_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "attempts/007").mkdir(parents=True)
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 6, "reason": "done"}\n{"attempt": 7, "rea')
    supervise(make_job(tmp_path, STAYS))
    assert [row["attempt"] for row in attempts_of(tmp_path)] == [6, 8]


def test_what_is_wrong_with_the_weights_is_not_tried_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, STAYS)
    missing = FileRecord("model.safetensors", 1, "0" * 32)
    job.rollout_receipt.unlink()
    write_receipt(job.rollout_receipt, Receipt("finalize_rollout_fp8", (missing,), {}, {}), time.time())
    with rejected("node-refused", "model.safetensors"):
        supervise(job)
    assert len(attempts_of(tmp_path)) == 1


def test_what_the_machine_refuses_a_rank_is_told_and_not_tried_again(tmp_path: Path) -> None:
    """Its log may lie on the very disk that is full: what it has to say reaches the head all the same."""
    (tmp_path / "nothing.yaml").symlink_to("nothing.yaml")
    with pytest.raises(CheckpointError) as refused:
        supervise(make_job(tmp_path, STAYS, required_arguments(tmp_path)))
    *_, cause, remedy = str(refused.value).splitlines()
    assert cause == f"  because: {tmp_path}/nothing.yaml: a link lies where a file of ours belongs"
    assert remedy.startswith("  remedy: ")
    (row,) = attempts_of(tmp_path)
    assert row["reason"] == str(refused.value)


def test_an_attempt_that_cannot_be_recorded_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "attempts.jsonl").symlink_to("nowhere")
    with pytest.raises(RuntimeError, match="engine 0 ended with exit code 3"):
        supervise(make_job(tmp_path, DIES, arguments=required_arguments(tmp_path)))
    assert "attempt 1 is not recorded: [Errno 40]" in caplog.text
    done = tmp_path / "done"
    done.mkdir()
    (done / "attempts.jsonl").symlink_to("nowhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        supervise(make_job(done, STAYS))


def test_a_run_that_somebody_writes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=f"is being written by process {holder.pid} on {os.uname().nodename}"):
            supervise(make_job(tmp_path, STAYS))
    finally:
        holder.kill()
        holder.communicate()
    assert not (tmp_path / "attempts").exists()

"""The supervisor with real child processes: what it starts it ends, what fails it names, and it gives up in the end.

Engines are small shell scripts in the place of `engine.python`; trainer ranks are the real program, with a command line
that it answers at once. Whole trainings under the supervisor are in tests/end_to_end/test_resume.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from posttrain.artifacts.lease import Lease
from posttrain.config.load import resolve
from posttrain.launch.supervisor import MAX_IDLE_ATTEMPTS, TrainingJob, supervise

CONFIG_DIR = Path(__file__).parents[3] / "config"
STAYS = "exec sleep 600"
DIES = "echo cannot serve this; exit 3"
ENDS_WELL = ("--help",)
WAITS = """
import sys, time
from pathlib import Path
from posttrain.artifacts.lease import Lease
with Lease(Path(sys.argv[1]), Path(sys.argv[1]) / "lease"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before, "the supervisor left a process behind"


def make_job(folder: Path, engine: str, arguments: tuple[str, ...] = ENDS_WELL) -> TrainingJob:
    """Return a job whose engine is a shell script, run in the job's folder."""
    script = folder / "engine"
    script.write_text(f"#!/bin/bash\ncd {folder}\n{engine}\n")
    script.chmod(0o755)
    config = resolve({"model": "tiny", "site": "local", "set": f"engine.python={script}"}, CONFIG_DIR).config
    return TrainingJob(config, folder, arguments, folder, prepare=(folder / "prepared").touch)


def attempts_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def test_all_ranks_done_ends_the_engines(tmp_path: Path) -> None:
    supervise(make_job(tmp_path, STAYS))
    assert [(row["attempt"], row["epoch"], row["reason"]) for row in attempts_of(tmp_path)] == [(1, 1, "done")]
    assert (tmp_path / "prepared").exists()
    assert "usage: trainer_rank.py" in (tmp_path / "attempts/001/trainer0.log").read_text()
    with Lease(tmp_path, tmp_path / "lease") as lease:
        assert lease.epoch == 2, "the first was released"


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


def test_progress_gives_new_attempts(tmp_path: Path) -> None:
    """Two attempts finish a chunk each and die; only those after them count as idle."""
    count = "n=$(ls attempts | wc -l); mkdir -p rollouts/step_000000"
    work = f"{count}; touch rollouts/step_000000/chunk_000$((n < 3 ? n : 2)).json"
    with pytest.raises(RuntimeError, match="3 times without progress"):
        supervise(make_job(tmp_path, f"{work}; {DIES}", arguments=required_arguments(tmp_path)))
    assert len(attempts_of(tmp_path)) == 2 + MAX_IDLE_ATTEMPTS


def test_attempts_go_on_counting_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "attempts/007").mkdir(parents=True)
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 6, "reason": "done"}\n{"attempt": 7, "rea')
    supervise(make_job(tmp_path, STAYS))
    assert [row["attempt"] for row in attempts_of(tmp_path)] == [6, 8]


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


def required_arguments(folder: Path) -> tuple[str, ...]:
    """Return a command line that a rank accepts; the files it names do not exist."""
    names = ("--config", "--run-name", "--run-folder", "--torch-dist", "--model-folder", "--dataset")
    return tuple(word for name in names for word in (name, str(folder / "nothing.yaml")))

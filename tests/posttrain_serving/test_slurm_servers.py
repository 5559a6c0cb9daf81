"""What `--stop` may end, and what it says of the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.rejections import assert_rejected

from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.store.processes import started_ticks
from posttrain_serving.servers import Server, read_servers, serving, this_machine, write_server
from posttrain_serving.slurm_servers import JOB_VARIABLE, job_of_this_process, place_in_job, stop, submit

CONFIG = Path(__file__).parents[2] / "config"
SERVER = Server("mine", "/models/mine", "abc", "embedded", this_machine(), 8500)


def refusal(results: Path, name: str = "") -> str:
    with pytest.raises(ConfigError) as refused:
        stop(results, name)
    return str(refused.value)


def test_there_is_nothing_to_end(tmp_path: Path) -> None:
    assert "nothing to end" in stop(tmp_path, "mine")[0]
    assert "no server of anybody" in stop(tmp_path, "")[0]


def test_one_of_several_has_to_be_named(tmp_path: Path) -> None:
    write_server(tmp_path, SERVER)
    write_server(tmp_path, dataclasses.replace(SERVER, name="another", port=8501))
    with pytest.raises(ConfigError) as refused:
        stop(tmp_path, "")
    (problem,) = refused.value.problems
    assert (problem.key, problem.allowed, problem.remedy) == ("--stop", "one of them", "posttrain serve NAME --stop")
    assert problem.value.count("/models/mine") == 2
    assert "mine (/models/mine) at" in stop(tmp_path, "mine")[0]
    assert [server.name for _, server in read_servers(tmp_path)] == ["another"]
    assert "lease was stale" in stop(tmp_path, "")[0]


def test_a_process_that_is_no_server_is_not_ended(tmp_path: Path) -> None:
    """This one."""
    with serving(tmp_path, SERVER):
        said = refusal(tmp_path, "mine")
        assert_rejected(said, "not-our-process", f"`kill {os.getpid()}`", key="--stop")
        assert read_servers(tmp_path)


@pytest.fixture
def bystander() -> Iterator[psutil.Popen]:
    """Another process of the same user, whose command line looks like a server's."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)", "posttrain", "serve"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("changed", [{}, {"started_ticks": 1}, {"process_ids": "elsewhere"}, {"host": "gpu7"}])
def test_a_planted_lease_ends_nobody(tmp_path: Path, bystander: psutil.Popen, changed: dict[str, object]) -> None:
    with serving(tmp_path, SERVER):
        (path,) = tmp_path.glob("serving/leases/*/*/epoch-*.json")
        ticks = started_ticks(bystander.pid)
        planted = {**json.loads(path.read_text()), "pid": bystander.pid, "started_ticks": ticks, **changed}
        path.unlink()
        path.write_text(json.dumps(planted))
        if changed.get("started_ticks"):
            assert "lease was stale" in stop(tmp_path, "mine")[0]
        else:
            assert_rejected(refusal(tmp_path, "mine"), "not-our-process", key="--stop")
    assert bystander.poll() is None


def test_the_process_that_has_taken_the_lease_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the system refuses it, as with another user's process."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    code = (
        "import sys, time; from pathlib import Path; from posttrain_serving.servers import *\n"
        f"with serving(Path({str(tmp_path)!r}), {SERVER!r}):\n    print('serves', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "serve"], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline() == b"serves\n"
        with monkeypatch.context() as refusing:
            refusing.setattr(psutil.Process, "terminate", refuse)
            said = refusal(tmp_path, "mine")
        assert_rejected(said, "server-of-another-user", f"--stop = {SERVER}, by ", key="--stop")
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        assert "has ended" in stop(tmp_path, "mine")[0]
        reaper.join()
    finally:
        process.kill()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder where commands of SLURM keep what they were asked for; a job runs until it is cancelled."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "state").write_text("RUNNING\n")
    commands = {
        "squeue": f'case "$*" in *%T*) cat {folder}/state;; *"--format %u %j") echo "me serve-x";; esac',
        "scancel": f'echo "$*" > {folder}/cancelled\n[ -e {folder}/deaf ] || echo CANCELLED > {folder}/state',
        "sbatch": f'for word in "$@"; do echo "$word"; done > {folder}/submitted\necho "42;cluster"',
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    monkeypatch.setattr("posttrain_serving.slurm_servers.LOOK_SECONDS", 0.01)
    return folder


JOB = dataclasses.replace(SERVER, host="", job="slurm:7")


def test_a_job_that_serves_is_cancelled_and_waited_for(tmp_path: Path, slurm: Path) -> None:
    path = write_server(tmp_path, JOB)
    assert stop(tmp_path, "mine") == [f"{JOB} has ended"]
    assert (slurm / "cancelled").read_text() == "7\n"
    assert not path.exists()
    path = write_server(tmp_path, JOB)
    assert stop(tmp_path, "mine") == [f"{JOB} had ended without a word: its lease was stale, and is gone"]
    assert not path.exists()


def test_a_job_that_does_not_end_is_told(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "deaf").touch()
    monkeypatch.setattr("posttrain_serving.slurm_servers.STOP_SECONDS", 0.1)
    path = write_server(tmp_path, JOB)
    with pytest.raises(RuntimeError, match=r"was told to end, and still runs after 0\.1 s"):
        stop(tmp_path, "mine")
    assert path.exists()


def test_a_job_is_submitted_with_the_words_of_this_command_line(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"model": "tiny", "site": "example_slurm"}, CONFIG).config
    job, log = submit(config, tmp_path / "results", "/models/mine", ["mine", "--port", "8500"], "mine", 2)
    assert (job, log) == ("slurm:42", tmp_path / "results/serving/slurm-42.log")
    assert log.parent.is_dir()
    *options, wrap, script = (slurm / "submitted").read_text().splitlines()
    assert (options[0], wrap) == ("--parsable", "--wrap")
    assert {"--nodes=2", "--job-name=serve-mine", f"--output={log.parent}/slurm-%j.log"} <= {*options}
    assert script == (
        "exec env POSTTRAIN_SERVING_JOB=$SLURMD_NODENAME srun --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 "
        f"{sys.executable} -m posttrain serve mine --port 8500"
    )
    monkeypatch.setenv(JOB_VARIABLE, "node3")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert place_in_job() == (1, "node3")


@pytest.mark.parametrize("is_folder", [True, False])
def test_an_image_shows_a_folder_that_is_served(tmp_path: Path, slurm: Path, is_folder: bool) -> None:
    (tmp_path / "mine").mkdir()
    words = f"site.store={tmp_path}/store site.results={tmp_path}/results"
    container = "site.container.runtime=apptainer site.container.image=/images/a.sif"
    config = resolve({"model": "tiny", "site": "example_slurm", "set": f"{words} {container}"}, CONFIG).config
    submit(config, tmp_path / "results", str(tmp_path / "mine") if is_folder else "owner/mine", [], "mine", 1)
    script = (slurm / "submitted").read_text()
    assert "/images/a.sif" in script
    assert (f"{tmp_path}/mine" in script) == is_folder
    assert (tmp_path / "store").is_dir()


@pytest.mark.parametrize(
    ("job", "told"),
    [("slurm:7", "somebody serve-x"), ("slurm:7", "me training"), ("slurm:--user=me", "me serve-x"), ("slurm:7", "")],
)
def test_a_planted_job_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, told: str) -> None:
    for name, prints in (("squeue", f'case "$*" in *%T*) echo RUNNING;; *) echo "{told}";; esac'), ("scancel", "")):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/asked\n{prints}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    write_server(tmp_path, dataclasses.replace(SERVER, host="", job=job))
    assert_rejected(refusal(tmp_path, "mine"), "no-such-job", key="--stop")
    assert "scancel" not in (tmp_path / "asked").read_text()


def test_a_server_of_another_machine_is_ended_there(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(SERVER, host="gpu7")
    with serving(tmp_path, elsewhere):
        said = refusal(tmp_path, "mine")
        assert_rejected(said, "server-elsewhere", "gpu7", this_machine(), key="--stop")


def test_a_job_that_slurm_does_not_tell_of_is_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    path = write_server(tmp_path, dataclasses.replace(SERVER, host="", job="slurm:7"))
    said = refusal(tmp_path, "7")
    assert_rejected(said, "no-such-job", key="--stop")
    assert path.exists()


def test_an_allocation_of_the_users_own_is_no_job_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_of_this_process() == ""
    monkeypatch.setenv(JOB_VARIABLE, "1")
    assert job_of_this_process() == "slurm:7"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert job_of_this_process() == ""

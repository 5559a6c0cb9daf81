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

from posttrain.artifacts.processes import started_ticks
from posttrain.errors import ConfigError
from posttrain.launch.served import JOB_VARIABLE, job_of_this_process, stop
from posttrain.serving.servers import Server, read_servers, serving, this_machine, write_server

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
    assert "posttrain serve NAME --stop" in refusal(tmp_path)
    assert "mine (/models/mine) at" in stop(tmp_path, "mine")[0]
    assert [server.name for _, server in read_servers(tmp_path)] == ["another"]
    assert "lease was stale" in stop(tmp_path, "")[0]


def test_a_process_that_is_no_server_is_not_ended(tmp_path: Path) -> None:
    """This one."""
    with serving(tmp_path, SERVER):
        assert "`posttrain serve` that has taken the lease" in refusal(tmp_path, "mine")
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
            assert "has taken the lease" in refusal(tmp_path, "mine")
    assert bystander.poll() is None


def test_the_process_that_has_taken_the_lease_is_ended(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from posttrain.serving.servers import *\n"
        f"with serving(Path({str(tmp_path)!r}), {SERVER!r}):\n    print('serves', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "serve"], stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline() == b"serves\n"
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        assert "has ended" in stop(tmp_path, "mine")[0]
        reaper.join()
    finally:
        process.kill()


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
    assert "a job of yours that serves" in refusal(tmp_path, "mine")
    assert "scancel" not in (tmp_path / "asked").read_text()


def test_a_server_of_another_machine_is_ended_there(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(SERVER, host="gpu7")
    with serving(tmp_path, elsewhere):
        assert "run it on gpu7" in refusal(tmp_path, "mine")


def test_a_job_that_slurm_does_not_tell_of_is_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    path = write_server(tmp_path, dataclasses.replace(SERVER, host="", job="slurm:7"))
    assert "where SLURM can be asked" in refusal(tmp_path, "7")
    assert path.exists()


def test_an_allocation_of_the_users_own_is_no_job_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_of_this_process() == ""
    monkeypatch.setenv(JOB_VARIABLE, "1")
    assert job_of_this_process() == "slurm:7"

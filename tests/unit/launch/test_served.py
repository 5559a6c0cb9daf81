"""What `--stop` may end, and what it says of the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

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
        assert "a process of `posttrain serve`" in refusal(tmp_path, "mine")
        assert read_servers(tmp_path)


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

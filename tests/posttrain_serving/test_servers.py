"""Leases on ports and GPUs: who has what is told before anybody takes it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.errors import ConfigError
from posttrain.store import Receipt, receipt_of, write_receipt
from posttrain_serving.servers import (
    Server,
    digest_of,
    holder_of,
    named,
    read_servers,
    serving,
    this_machine,
    visible_gpus,
    write_server,
)

SERVER = Server("mine", "/models/mine", "abc", "vllm", this_machine(), 8400, ("0", "1"))
OTHER = dataclasses.replace(SERVER, name="another", port=8401)


def test_a_server_is_known_as_long_as_it_serves(tmp_path: Path) -> None:
    with serving(tmp_path, SERVER):
        ((path, found),) = read_servers(tmp_path)
        assert found == SERVER
        assert holder_of(tmp_path, SERVER) is not None
    assert read_servers(tmp_path) == []
    assert not path.exists()
    assert holder_of(tmp_path, SERVER) is None
    with serving(tmp_path, SERVER):
        pass


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (dataclasses.replace(OTHER, gpus=("1", "2")), "GPU 1 = has process"),
        (dataclasses.replace(OTHER, port=8400, gpus=()), "port 8400 = has process"),
    ],
)
def test_what_somebody_has_is_refused_and_nothing_else_is_kept(tmp_path: Path, other: Server, told: str) -> None:
    with serving(tmp_path, SERVER):
        with pytest.raises(ConfigError) as refused, serving(tmp_path, other):
            pass
        assert told in str(refused.value)
        assert "which serves mine (/models/mine)" in str(refused.value)
        assert "`posttrain serve mine --stop`" in str(refused.value)
        assert [server for _, server in read_servers(tmp_path)] == [SERVER]
        with serving(tmp_path, dataclasses.replace(other, port=8402, gpus=("2",))):
            pass


def test_gpus_of_another_machine_and_of_a_further_node_are_others(tmp_path: Path) -> None:
    with (
        serving(tmp_path, SERVER),
        serving(tmp_path, dataclasses.replace(SERVER, host="elsewhere")),
        serving(tmp_path, dataclasses.replace(OTHER, host="a-third-one", port=8400), is_first=False),
    ):
        assert len(read_servers(tmp_path)) == 2, "a further node tells nothing of its own"


def test_a_file_without_a_holder_is_stale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_server(tmp_path, OTHER)
    in_queue = write_server(tmp_path, dataclasses.replace(SERVER, host="", job="slurm:7"))
    with caplog.at_level(logging.WARNING), serving(tmp_path, SERVER):
        assert "another (/models/mine) at" in caplog.text
        assert "its lease is stale" in caplog.text
        assert {server.name for _, server in read_servers(tmp_path)} == {"mine"}
    assert in_queue.exists(), "a job that waits has no lease yet"


def test_files_that_are_not_of_a_server_are_named(tmp_path: Path) -> None:
    path = write_server(tmp_path, SERVER)
    for content in ("{", "{}", '{"gpus": 3}', '{"gpus": [], "name": "x"}'):
        path.write_text(content)
        with rejected("server-record-invalid", path.name):
            read_servers(tmp_path)


def test_names_folders_and_jobs_mean_a_server(tmp_path: Path) -> None:
    in_job = dataclasses.replace(OTHER, job="slurm:17", checkpoint=str(tmp_path))
    for server in (SERVER, in_job):
        write_server(tmp_path, server)
    known = read_servers(tmp_path)

    def found(name: str) -> list[str]:
        return [server.name for _, server in named(known, name)]

    assert found("mine") == ["mine"]
    assert found("17") == found(str(tmp_path)) == ["another"]
    assert found("") == ["mine", "another"] or found("") == ["another", "mine"]
    assert found("nobody") == []


def test_what_tells_a_checkpoint_from_others(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    assert digest_of(folder) == ""
    (folder / "config.json").write_text("{}")
    of_config = digest_of(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert len({"", of_config, digest_of(folder)}) == 3
    receipt = Receipt("finalize_export_hf", (), {}, {})
    write_receipt(receipt_of(folder), receipt)
    assert digest_of(folder) == receipt.digest


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "5,6,7"}, ("5", "6")),
        ({"HIP_VISIBLE_DEVICES": "3"}, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a/b"}, ("GPU-8a/b",)),
    ],
)
def test_the_gpus_of_an_engine_are_the_first_that_it_sees(
    variables: dict[str, str], seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert visible_gpus(2) == seen
    with serving(tmp_path, dataclasses.replace(SERVER, gpus=seen)):
        pass

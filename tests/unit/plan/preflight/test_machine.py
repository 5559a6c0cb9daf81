import dataclasses
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.plan.preflight.machine import (
    check_broadcast,
    check_devices,
    check_engine_interpreter,
    check_image,
    check_interpreter,
    check_open_files,
    check_port,
    check_ports,
)
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"


def config_of(model, overrides=""):
    return resolve({"model": model, "site": "local", "set": overrides}, CONFIG_DIR).config


def test_an_interpreter_that_has_the_module_passes_and_its_version_is_shown():
    finding = check_interpreter("engine.python", sys.executable, "xxhash")
    import xxhash

    assert finding.status == "ok"
    assert finding.detail.endswith(f"xxhash {xxhash.__version__}" if hasattr(xxhash, "__version__") else "version")


def test_an_interpreter_without_the_module_is_a_problem_that_shows_the_error():
    finding = check_interpreter("engine.python", sys.executable, "no_such_engine")
    assert finding.problem.key == "engine.python"
    assert "No module named 'no_such_engine'" in finding.problem.value
    assert "no_such_engine" in finding.problem.remedy


def test_an_interpreter_that_does_not_exist_is_a_problem(tmp_path):
    finding = check_interpreter("engine.python", str(tmp_path / "python"), "sglang")
    assert finding.problem.allowed == "an interpreter that exists"


def test_a_program_that_is_no_interpreter_is_a_problem(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    program.chmod(0o755)
    assert check_interpreter("engine.python", str(program), "sglang").problem.value.endswith("broken")


def test_the_engine_kind_decides_what_must_be_importable():
    assert check_engine_interpreter(config_of("tiny")).status == "ok"
    overrides = f"engine.kind=sglang engine.python={sys.executable} engine.dtype=bfloat16"
    finding = check_engine_interpreter(config_of("tiny", overrides))
    assert finding.name == "engine.python imports sglang"


def test_what_an_image_holds_is_not_looked_for_here(tmp_path):
    image = tmp_path / "cpu.sif"
    on_slurm = "site.launcher=slurm site.node_names=[] engine.python=/opt/engine/bin/python"
    config = config_of("tiny", f"{on_slurm} site.container.runtime=apptainer site.container.image={image}")
    assert check_engine_interpreter(config).status == "skipped"
    assert check_image(config).problem.value == f"{image}: no such file"
    image.touch()
    assert check_image(config).status == "ok"
    assert check_image(config_of("tiny")).status == "skipped"


def test_a_busy_port_is_a_problem_and_a_free_one_is_not():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        finding = check_port(port)
        assert finding.problem.value == f"{port}: Address already in use"
    assert check_port(port).status == "ok"


def test_ports_are_checked_for_every_engine_when_they_are_fixed():
    config = config_of("tiny", "engine.port=39100 engine.num_engines=2")
    assert [finding.name for finding in check_ports(config)] == ["port 39100", "port 39101"]
    assert [finding.status for finding in check_ports(config_of("tiny"))] == ["skipped"]


def test_a_cpu_needs_no_devices():
    assert check_devices(config_of("tiny")).status == "ok"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has CUDA devices")
def test_missing_gpus_are_a_problem():
    finding = check_devices(config_of("glm5"))
    assert finding.problem.value == "0 CUDA devices here"
    assert finding.problem.allowed == "at least 8"


def test_gpus_of_a_cluster_are_not_looked_for_here():
    config = config_of("glm5")
    site = dataclasses.replace(config.site, launcher="slurm")
    assert check_devices(dataclasses.replace(config, site=site)).status == "skipped"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_present_gpus_pass():
    config = config_of("glm5")
    hardware = dataclasses.replace(config.hardware, gpus_per_node=torch.cuda.device_count())
    assert check_devices(dataclasses.replace(config, hardware=hardware)).status == "ok"


def test_a_broadcast_needs_its_library(monkeypatch):
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    asked = dataclasses.replace(config, stage=dataclasses.replace(config.stage, broadcast="bittorrent"))
    assert check_broadcast(asked).status == "ok"
    assert check_broadcast(config).status == "skipped"
    container = dataclasses.replace(config.site.container, runtime="pyxis", image="/shared/gpu.sqsh")
    in_image = dataclasses.replace(asked, site=dataclasses.replace(config.site, container=container))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_broadcast(asked).problem.key == "stage.broadcast"
    assert check_broadcast(in_image).status == "skipped"


# Looks under limits, and says what was found and which limit it then has.
LOOK = """
import json, resource, sys
from pathlib import Path
from posttrain.plan.resolve import resolve
from posttrain.plan.preflight.machine import check_open_files
config = resolve({"model": "tiny", "site": "local"}, Path(sys.argv[1])).config
for limits in json.loads(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    finding = check_open_files(config)
    print(json.dumps([finding.as_dict(), resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def test_the_limit_of_open_files_is_raised_where_it_may_be_and_told_where_not():
    # 128 for the rank, 16 for each rank of the job, one for each prompt of a rollout.
    assert config_of("tiny").rollout.rollout_batch_size == 16
    limits = [(1024, 4096), (160, 4096), (159, 160), (64, 159), (159, 159)]
    words = [sys.executable, "-c", LOOK, str(CONFIG_DIR), json.dumps(limits)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["status"], row["detail"], tuple(now)) for row, now in rows] == [
        ("ok", "1024 allowed, 160 needed", (1024, 4096)),
        ("ok", "160 allowed, 160 needed", (160, 4096)),
        ("ok", "160 needed, the limit was raised from 159 to that", (160, 160)),
        ("problem", "64, at most 159", (64, 159)),
        ("problem", "159, at most 159", (159, 159)),
    ]
    problem = rows[3][0]["problem"]
    assert (problem["key"], problem["allowed"]) == ("ulimit -n", "at least 160")
    assert "ulimit -Hn" in problem["remedy"]


def test_more_ranks_and_prompts_need_more_open_files(monkeypatch):
    glm5 = config_of("glm5")
    needed = 128 + 16 * 128 + glm5.rollout.rollout_batch_size
    for unlimited in (resource.RLIM_INFINITY, needed):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=unlimited: (limit, resource.RLIM_INFINITY))
        assert check_open_files(glm5).status == "ok"
    assert check_open_files(glm5).detail == f"{needed} allowed, {needed} needed"
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (needed - 1, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    assert check_open_files(glm5).status == "ok"
    assert raised == [(needed, resource.RLIM_INFINITY)]

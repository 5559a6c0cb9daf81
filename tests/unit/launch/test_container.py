from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.config.schema import Config
from posttrain.launch.container import CLONE, CODE, srun_options, wrap

CONFIG_DIR = Path(__file__).parents[3] / "config"
COMMAND = (sys.executable, "scripts/train_grpo.py", "--node", "a b")


def config_with(runtime: str, device: str = "cpu", **container: object) -> Config:
    choice = {"model": "tiny"} if device == "cpu" else {"model": "glm5"}
    config = resolve({**choice, "site": "local"}, CONFIG_DIR).config
    roots = {"store": "/shared/store", "results": "/shared/results", "node_local": "/nvme"}
    chosen = dataclasses.replace(config.site.container, runtime=runtime, **container)
    return dataclasses.replace(config, site=dataclasses.replace(config.site, container=chosen, **roots))


def test_without_a_runtime_nothing_changes() -> None:
    config = config_with("none")
    assert wrap(COMMAND, config) == COMMAND
    assert srun_options(config) == ()


def test_apptainer_stands_behind_srun_and_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    mounts = ["/etc/libibverbs.d:/etc/libibverbs.d:ro", "/data"]
    config = config_with("apptainer", "cuda", image="/shared/gpu.sif", mounts=mounts, options=["--writable-tmpfs"])
    binds = ",".join(f"{folder}:{folder}" for folder in ("/tmp", CLONE, "/shared/store", "/shared/results", "/nvme"))
    assert srun_options(config) == ()
    assert wrap(COMMAND, config) == (
        *("apptainer", "exec", "--nv", "--bind", f"{binds},{mounts[0]},/data:/data", "--pwd", "/tmp"),
        *("--writable-tmpfs", "/shared/gpu.sif", "env", f"PYTHONPATH={CODE}"),
        *("python", "scripts/train_grpo.py", "--node", "a b"),
    )


def test_apptainer_shows_gpus_only_where_there_are_some() -> None:
    assert "--nv" not in wrap(COMMAND, config_with("apptainer", image="/shared/cpu.sif"))


def test_pyxis_is_options_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    config = config_with("pyxis", image="/shared/gpu.sqsh", options=["--container-writable"])
    assert wrap(COMMAND, config) == ("env", f"PYTHONPATH={CODE}", "python", *COMMAND[1:])
    assert srun_options(config) == (
        "--container-image=/shared/gpu.sqsh",
        f"--container-mounts=/tmp:/tmp,{CLONE}:{CLONE},"
        "/shared/store:/shared/store,/shared/results:/shared/results,/nvme:/nvme",
        "--container-workdir=/tmp",
        "--container-writable",
    )


def test_another_program_keeps_its_name() -> None:
    words = wrap(("nvidia-smi", "-L"), config_with("pyxis", image="/shared/gpu.sqsh"))
    assert words[-2:] == ("nvidia-smi", "-L")


def test_the_code_is_the_clones(tmp_path: Path) -> None:
    """What stands behind the runtime starts our code, also from another folder and with nothing installed there."""
    words = wrap((sys.executable, "-c", "import posttrain; print(posttrain.__file__)"), config_with("pyxis"))
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path).stdout.strip()
    assert Path(said).parents[1] == CODE

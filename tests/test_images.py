"""The images' definitions: linted by hadolint, and their pins held against each other and against what is tested."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVS = ROOT / "envs"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def pins(path: Path) -> dict[str, str]:
    """Return name -> version of a file's pins."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


TRAINER, ENGINE = pins(ENVS / "gpu" / "trainer.txt"), pins(ENVS / "gpu" / "engine.txt")
TESTED = pins(ENVS / "cpu" / "constraints.txt")
DOCKERFILE = (ENVS / "gpu" / "Dockerfile").read_text()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_hadolint_finds_nothing(kind: str) -> None:
    program = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([program, ENVS / kind / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN cd /tmp && apt-get install gcc\n")
    program = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([program, tmp_path / "Dockerfile"], capture_output=True, text=True, check=False)
    assert "DL3006" in ended.stdout


@pytest.mark.parametrize(("name", "locked"), [("trainer", TRAINER), ("engine", ENGINE)])
def test_what_is_asked_for_is_locked(name: str, locked: dict[str, str]) -> None:
    asked = pins(ENVS / "gpu" / f"{name}.in")
    assert asked
    assert asked.items() <= locked.items()
    unpinned = [line for line in (ENVS / "gpu" / f"{name}.txt").read_text().splitlines() if "==" not in line]
    assert not unpinned


def test_the_trainer_has_what_is_tested_on_cpus() -> None:
    differing = {name for name in TRAINER.keys() & TESTED.keys() if TRAINER[name] != TESTED[name]}
    assert differing == {"torch", "triton"}
    assert {"megatron-core", "transformers", "huggingface-hub", "snakemake"} <= TRAINER.keys() & TESTED.keys()


def test_both_environments_share_one_cuda_stack() -> None:
    """Weights go from one to the other as CUDA handles, and both talk NCCL on the same devices."""
    stack = (
        "torch",
        "triton",
        "nvidia-nccl",
        "nvidia-cudnn-cu",
        "nvidia-cublas",
        "nvidia-cuda-runtime",
        "nvidia-nvshm",
    )
    shared = {name for name in TRAINER.keys() & ENGINE.keys() if name.startswith(stack)}
    assert len(shared) >= len(stack)
    assert {name: TRAINER[name] for name in shared} == {name: ENGINE[name] for name in shared}
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.", DOCKERFILE, re.MULTILINE)
    assert cuda
    assert TRAINER["nvidia-cuda-runtime"].startswith(f"{cuda[1]}.")


def test_sglang_is_the_one_whose_flags_are_tested() -> None:
    assert ENGINE["sglang"] == pins(ENVS / "sglang-cpu" / "requirements.txt")["sglang"]


def test_the_extension_belongs_to_its_library() -> None:
    (extension,) = re.findall(r"transformer-engine-torch==(\S+)", DOCKERFILE)
    assert extension == TRAINER["transformer-engine"] == TRAINER["transformer-engine-cu13"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_one_file_is_made_from_the_image(kind: str) -> None:
    text = (ENVS / kind / "image.def").read_text()
    header = dict(re.findall(r"^(Bootstrap|From): (\S+)$", text, re.MULTILINE))
    tag = f"posttrain-{kind}:{VERSION}"
    assert header == {"Bootstrap": "docker-daemon", "From": tag}
    assert f"--tag {tag} " in (ENVS / kind / "Dockerfile").read_text()
    assert set(re.findall(r"^%(\w+)", text, re.MULTILINE)) <= {"environment", "test"}

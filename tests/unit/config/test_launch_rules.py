from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.launch_rules import LAUNCH_RULES
from posttrain.config.load import resolve
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
IMAGE = "registry.example/posttrain:0.2.0"
PODS = "site.launcher=kubernetes site.node_names=[] site.node_local=/nvme/posttrain"
MOUNTED = "site.kubernetes.volumes=['/shared=pvc:shared','/nvme=host:/mnt/nvme']"


def problems_of(overrides: str) -> list[Problem]:
    try:
        resolve({"model": "tiny", "site": "local", "set": overrides}, CONFIG_DIR)
    except ConfigError as error:
        return list(error.problems)
    return []


def with_site(launcher: str = "slurm", **container: Any) -> Config:
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    chosen = dataclasses.replace(config.site.container, **container)
    return dataclasses.replace(config, site=dataclasses.replace(config.site, launcher=launcher, container=chosen))


def broken(config: Config) -> list[str]:
    return [problem.key for rule in LAUNCH_RULES for problem in rule(config)]


def test_containers_that_srun_can_start() -> None:
    assert broken(with_site(runtime="apptainer", image="/shared/gpu.sif", mounts=["/data", "/a:/b:ro"])) == []
    assert broken(with_site(runtime="pyxis", image="/shared/gpu.sqsh")) == []


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ({"runtime": "apptainer"}, "site.container.image"),
        ({"runtime": "apptainer", "image": "gpu.sif"}, "site.container.image"),
        ({"runtime": "apptainer", "image": "/shared/gpu.sqsh"}, "site.container.image"),
        ({"runtime": "pyxis", "image": "nvcr.io/nvidia/pytorch:26.10-py3"}, "site.container.image"),
        ({"runtime": "pyxis", "image": "/shared/gpu.sqsh", "mounts": ["data"]}, "site.container.mounts"),
        ({"runtime": "pyxis", "image": "/shared/gpu.sqsh", "mounts": ["/a:/b:rw"]}, "site.container.mounts"),
        ({"runtime": "pyxis", "image": "/shared/gpu.sqsh", "mounts": ["/a,/b"]}, "site.container.mounts"),
        ({"image": "/shared/gpu.sif"}, "site.container.image"),
        ({"mounts": ["/data"]}, "site.container.mounts"),
    ],
)
def test_containers_that_it_cannot(container: dict[str, Any], key: str) -> None:
    assert broken(with_site(**container)) == [key]


@pytest.mark.parametrize("launcher", ["local", "kubernetes"])
def test_a_runtime_needs_srun(launcher: str) -> None:
    config = with_site(launcher, runtime="apptainer", image="/shared/gpu.sif")
    assert "site.container.runtime" in broken(config)


def test_pods_that_have_all_they_need() -> None:
    assert problems_of(f"{PODS} {MOUNTED} site.kubernetes.image={IMAGE} site.store=/shared/store") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("site.kubernetes.image=''", "site.kubernetes.image"),
        ("site.kubernetes.image=registry.example/posttrain", "site.kubernetes.image"),
        ("site.kubernetes.image=registry.example:5000/posttrain", "site.kubernetes.image"),
        ("site.kubernetes.image=registry.example/posttrain:latest", "site.kubernetes.image"),
        ("site.kubernetes.namespace=Team_A", "site.kubernetes.namespace"),
        ("site.kubernetes.volumes=['/shared=pvc:shared','/nvme=/mnt/nvme']", "site.kubernetes.volumes"),
        ("site.kubernetes.volumes=['/nvme=empty','/nvme=host:/mnt']", "site.kubernetes.volumes"),
        ("site.kubernetes.resources=[cpu]", "site.kubernetes.resources"),
        ("site.kubernetes.resources=[memory=1.5TB]", "site.kubernetes.resources"),
        ("site.kubernetes.tolerations=['gpu=yes:Never']", "site.kubernetes.tolerations"),
        ("site.kubernetes.node_selector=[gpu]", "site.kubernetes.node_selector"),
        ("site.kubernetes.capabilities=[ipc-lock]", "site.kubernetes.capabilities"),
        ("site.store=/elsewhere", "site.store"),
        ("site.node_local=node_local", "site.node_local"),
        ("site.node_names=[node0]", "site.node_names"),
        ("site.kubernetes.max_restarts=-1", "site.kubernetes.max_restarts"),
    ],
)
def test_pods_that_a_cluster_would_refuse(overrides: str, key: str) -> None:
    given = f"{PODS} {MOUNTED} site.kubernetes.image={IMAGE} {overrides}"
    assert [problem.key for problem in problems_of(given)] == [key]


@pytest.mark.parametrize(("item", "shown"), [("HF_TOKEN=hf_abc", "'HF_TOKEN=...'"), ("hf_abc", "an item without '='")])
def test_a_secret_written_as_a_value_is_refused_and_not_shown(item: str, shown: str) -> None:
    given = f"{PODS} {MOUNTED} site.kubernetes.image={IMAGE}"
    (problem,) = problems_of(f"{given} site.kubernetes.secrets=[{item}]")
    assert problem.value == shown
    assert problem.key == "site.kubernetes.secrets"
    assert "hf_abc" not in str(problem)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.kubernetes_server import KubernetesServer

from posttrain.cluster.cluster_check import check_cluster
from posttrain.cluster.container import CLONE
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    monkeypatch.chdir(tmp_path)
    with KubernetesServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


def config_at(*mounted: Path) -> Config:
    volumes = ",".join(f"'{folder}=pvc:shared'" for folder in mounted)
    overrides = (
        f"site.launcher=kubernetes site.node_names=[] site.node_local={mounted[0]}/local"
        f" site.kubernetes.volumes=[{volumes}] site.kubernetes.image=registry/image:1"
    )
    return resolve({"model": "tiny", "site": "local", "set": overrides}, CONFIG_DIR).config


def test_a_cluster_that_has_all(server: KubernetesServer, tmp_path: Path) -> None:
    assert [found.status for found in check_cluster(config_at(tmp_path, CLONE))] == ["ok", "ok"]


def test_a_cluster_without_jobset(server: KubernetesServer, tmp_path: Path) -> None:
    server.has_jobset = False
    found, rights = check_cluster(config_at(tmp_path, CLONE))
    assert found.problem
    assert "install it" in found.problem.remedy
    assert rights.status == "ok"


def test_every_missing_right_is_named(server: KubernetesServer, tmp_path: Path) -> None:
    server.denied = {("delete", "jobsets"), ("get", "pods/log")}
    _, rights = check_cluster(config_at(tmp_path, CLONE))
    assert rights.problem
    assert rights.problem.value == "default: no right to delete jobsets, get pods/log"


def test_folders_that_pods_do_not_see(server: KubernetesServer, tmp_path: Path) -> None:
    findings = check_cluster(config_at(tmp_path / "elsewhere"))
    assert [found.status for found in findings] == ["problem", "problem", "ok", "ok"]


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none.yaml"))
    (found,) = check_cluster(config_at(tmp_path, CLONE))
    assert found.problem
    assert found.problem.key == "KUBECONFIG"


def test_a_cluster_that_does_not_answer(server: KubernetesServer, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    (found,) = check_cluster(config_at(tmp_path, CLONE), timeout_seconds=0.0)
    assert found.problem
    assert "has not answered" in found.problem.value


def test_other_launchers_need_none() -> None:
    (found,) = check_cluster(resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config)
    assert found.is_skipped

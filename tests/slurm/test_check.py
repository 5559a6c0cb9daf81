"""What `snakemake check` says of a scheduler, asked of a real one."""

from __future__ import annotations

import pytest
from tests.support.slurm_cluster import Cluster
from tests.support.workflow_runs import ROOT

from posttrain.plan.preflight.report import Finding
from posttrain.plan.preflight.scheduler import check_scheduler
from posttrain.plan.resolve import resolve


def findings(settings: str = "", nodes: int = 4) -> list[Finding]:
    choice = {"model": "tiny", "site": "slurm_localhost", "nodes": nodes, "set": settings}
    return check_scheduler(resolve(choice, ROOT / "config").config)


@pytest.fixture(autouse=True)
def as_a_client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


def test_a_partition_that_is_large_enough() -> None:
    assert [finding.status for finding in findings()] == ["ok", "ok"]


def test_what_the_partition_lacks_is_named() -> None:
    (too_small,) = (f.problem for f in findings("site.slurm.spare_nodes=2") if f.problem)
    assert too_small.value == "5 nodes in gpu"
    (unknown,) = (f.problem for f in findings("site.slurm.partition=cpu") if f.problem)
    assert unknown.key == "site.slurm.partition"


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = findings()
    assert finding.problem is not None
    assert "sbatch" in finding.problem.value

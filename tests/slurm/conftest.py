from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.slurm.cluster import Cluster, require_slurm, running_cluster
from tests.workflow_runs import ROOT, WorkflowFolder

PROFILE = ROOT / "workflow" / "profiles" / "slurm-localhost"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five nodes: four that train and a spare one."""
    require_slurm()
    with running_cluster(nodes=5) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    for job in cluster.jobs():
        cluster.ask("scancel", job)


@dataclass
class SlurmFolder(WorkflowFolder):
    """A working directory whose steps are SLURM jobs.

    Args:
        nodes: Of training.
    """

    nodes: int = 4

    def command(self, *targets: str, **arguments) -> list[str]:
        config = {"site": "slurm_localhost", "nodes": self.nodes}
        words = super().command(*targets, config=config, **arguments)
        at = words.index("--cores")
        return [*words[:at], "--workflow-profile", str(PROFILE), *words[at + 2 :]]


@pytest.fixture
def on_slurm(store: Path, cluster: Cluster, tmp_path: Path) -> SlurmFolder:
    """A fresh working directory over the shared store."""
    return SlurmFolder(tmp_path / "on_slurm", store, environment=cluster.environment)

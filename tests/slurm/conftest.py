from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.cluster import Cluster, require_slurm, running_cluster
from tests.workflow_runs import ROOT, WorkflowFolder

PROFILE = ROOT / "workflow" / "profiles" / "slurm-localhost"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five nodes: four that train and a spare one."""
    require_slurm()
    # A short path: munge's socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running_cluster(Path(folder), nodes=5) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    for job in cluster.jobs():
        cluster.ask("scancel", job)


class SlurmFolder(WorkflowFolder):
    """A working directory whose steps are SLURM jobs."""

    def command(self, *targets: str, **arguments) -> list[str]:
        words = super().command(*targets, **arguments)
        at = words.index("--cores")
        return [*words[:at], "--workflow-profile", str(PROFILE), *words[at + 2 :]]


@pytest.fixture
def on_slurm(store: Path, cluster: Cluster, tmp_path: Path) -> SlurmFolder:
    """A fresh working directory over the shared store."""
    return SlurmFolder(tmp_path / "on_slurm", store, environment=cluster.environment)

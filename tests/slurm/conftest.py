from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.cluster import Cluster, require_slurm, running_cluster
from tests.slurm.slurm_folder import SlurmFolder


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


@pytest.fixture
def on_slurm(store: Path, cluster: Cluster, tmp_path: Path) -> SlurmFolder:
    """A fresh working directory over the shared store."""
    return SlurmFolder(tmp_path / "on_slurm", store, environment=cluster.environment)

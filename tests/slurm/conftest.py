from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from tests.support.disturbed_run import TWO_RANKS, DisturbedRun
from tests.support.power_cut import Disk, new_disk
from tests.support.slurm_cluster import Cluster, require_slurm, running_cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import WorkflowFolder

# By its name one of ours; ending ours by name would end it.
BYSTANDER = "exec -a posttrain.cluster.node sleep 3600"


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


@pytest.fixture(scope="session")
def one_machine(store: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """The layout and the engines of `two_nodes` on one machine, undisturbed."""
    settings = TWO_RANKS | {"hardware.gpus_per_node": 2}
    workflow = WorkflowFolder(tmp_path_factory.mktemp("one_machine"), store, settings)
    workflow.run("train")
    return workflow


@pytest.fixture
def two_nodes(on_slurm: SlurmFolder) -> SlurmFolder:
    """Two nodes of one rank."""
    on_slurm.nodes, on_slurm.settings = 2, dict(TWO_RANKS)
    return on_slurm


@pytest.fixture
def bystanders(cluster: Cluster) -> Iterator[None]:
    """Somebody else's process on every node; it ends with the node's power and for no other reason."""
    cluster.wait_until_idle()
    cluster.cut_nodes.clear()
    processes = {node: cluster.start_on(node, "bash", "-c", BYSTANDER) for node in cluster.nodes}
    yield
    ended = [node for node, process in processes.items() if process.poll() is not None]
    for process in processes.values():
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()
        process.wait(60)
    assert set(ended) <= cluster.cut_nodes


@pytest.fixture
def disturb(two_nodes: SlurmFolder, cluster: Cluster, bystanders: None) -> Iterator[Callable[..., DisturbedRun]]:
    """Start the training of `two_nodes`, with other settings or in another folder where they are given."""
    runs = []

    def begin(settings: Mapping[str, object] = MappingProxyType({}), folder: Path = two_nodes.folder) -> DisturbedRun:
        two_nodes.settings.update(settings)
        two_nodes.folder = folder
        runs.append(DisturbedRun(two_nodes, cluster))
        return runs[-1]

    yield begin
    for run in runs:
        run.abandon()


@pytest.fixture
def shared_disk(cluster: Cluster, tmp_path: Path) -> Iterator[Disk]:
    """A file system of its own that every node sees."""
    with new_disk(tmp_path, size_mib=512) as disk, ExitStack() as stack:
        (device,) = [part.device for part in psutil.disk_partitions(all=True) if part.mountpoint == str(disk.folder)]
        for node in cluster.nodes:
            cluster.call_on(node, "mount", device, disk.folder)
            stack.callback(cluster.call_on, node, "umount", "--lazy", disk.folder)
        yield disk

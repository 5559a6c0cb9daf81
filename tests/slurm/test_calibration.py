"""A calibration over two nodes of a real SLURM: a rank on each, with the bits of both on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.disturbed_run import TWO_RANKS
from tests.support.interruptions import assert_gone, find_processes, start
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import WorkflowFolder

from posttrain.store import require_files

pytestmark = pytest.mark.faults("slow")

RANK = "posttrain.cluster.calibration_rank"
SETTINGS = TWO_RANKS | {
    "serving.passes.deep.num_samples": 0,
    "serving.samples_per_shard": 1,
}


def made(workflow: WorkflowFolder) -> dict[str, bytes]:
    """What it has come to, whole as its receipt says."""
    (receipt,) = workflow.store.glob("tiny/*/calibration-*.receipt.json")
    folder = receipt.with_name(receipt.name.removesuffix(".receipt.json"))
    require_files(folder, receipt, content=True)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_two_nodes_see_what_one_machine_sees(store: Path, cluster: Cluster, tmp_path: Path) -> None:
    """The second time, after the rank of the second node was killed in the middle."""
    stores = [tmp_path / name for name in ("store_of_two", "store_of_one")]
    for copy in stores:
        shutil.copytree(store, copy)
    on_two = SlurmFolder(tmp_path / "on_slurm", stores[0], SETTINGS, environment=cluster.environment, nodes=2)
    driver = start(on_two, "calibrate")
    driver.wait_until(lambda: len(find_processes(on_two, RANK)) >= 2 and has_finished(on_two), 300)
    (second,) = (process for process in find_processes(on_two, RANK) if process.environ().get("RANK") == "1")
    second.kill()
    code, output = driver.finish()
    assert code == 1
    assert "on n1: " in output, output[-4000:]
    assert_gone(on_two)
    assert "(2 nodes" in on_two.run("calibrate")
    logs = [path.read_text() for path in sorted((on_two.folder / "logs/calibrate").glob("*/trainer*.log"))]
    assert len(logs) == 2
    assert "goes on behind shard" in logs[0]
    on_one = WorkflowFolder(tmp_path / "beside", stores[1], SETTINGS | {"hardware.gpus_per_node": 2})
    on_one.run("calibrate")
    assert made(on_two) == made(on_one)
    assert_gone(on_two)


def has_finished(workflow: WorkflowFolder) -> bool:
    """Tell whether a shard is durable."""
    return bool([*workflow.store.glob("tiny/*/calibration-*.partial/state/*.safetensors")])

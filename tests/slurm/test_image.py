"""Jobs and a gang of two nodes that start in a site's image, over a real SLURM and stand-ins for the runtimes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.image_runtimes import ImageRuntime
from tests.support.interruptions import assert_same_training
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import FAST, WorkflowFolder

pytestmark = pytest.mark.slow

TWO_RANKS = FAST | {"parallel.pipeline_model_parallel_size": 2, "engine.num_engines": 2, "engine.num_threads": 1}


@pytest.mark.parametrize("name", ["apptainer", "pyxis"])
def test_jobs_start_in_the_image(on_slurm: SlurmFolder, tmp_path: Path, name: str) -> None:
    """A step that writes a new store, behind the executor's srun or in a step of its own."""
    runtime = ImageRuntime(tmp_path / "runtime", name)
    on_slurm.settings |= runtime.settings
    on_slurm.environment |= runtime.environment
    on_slurm.store = tmp_path / "store"
    on_slurm.run("download_dataset")
    (receipt,) = on_slurm.store.glob("datasets/*.receipt.json")
    (words,) = runtime.calls()
    assert words[-1] == str(receipt)


@pytest.mark.faults("slow")
def test_a_gang_starts_in_the_image(on_slurm: SlurmFolder, workflow: WorkflowFolder, tmp_path: Path) -> None:
    """On each node's own disk, in a folder that nobody has made; with the bits of one machine without an image."""
    runtime = ImageRuntime(tmp_path / "runtime", "apptainer")
    on_slurm.nodes = 2
    on_slurm.settings = TWO_RANKS | runtime.settings | {"site.node_local": f"/local_nvme/{tmp_path.name}"}
    on_slurm.environment |= runtime.environment
    workflow.settings = TWO_RANKS | {"hardware.gpus_per_node": 2}
    on_slurm.run("train")
    workflow.run("train")
    assert_same_training(on_slurm, workflow)
    supervisors = [words for words in runtime.calls() if "posttrain.cluster.node" in words]
    assert len(supervisors) == 2, "one on each node"

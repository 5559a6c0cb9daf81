"""A real SGLang on a node of its own, over a real SLURM: weights from shard to shard, with their proof."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.test_sglang import architecture, model, prompts, settings  # noqa: F401 fixtures
from tests.support.interruptions import assert_same_training, attempts_of
from tests.support.sglang_environment import require_sglang
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import WorkflowFolder

pytestmark = [pytest.mark.faults("slow"), pytest.mark.sglang]


def test_weights_reach_an_engine_on_another_node(
    on_slurm: SlurmFolder,
    tmp_path: Path,
    settings: dict[str, object],  # noqa: F811
) -> None:
    """With the bits of an engine beside the trainer."""
    require_sglang()
    settings |= {"training.num_steps": 3}
    beside = WorkflowFolder(tmp_path / "beside", tmp_path / "store", settings)
    beside.run("train")
    on_slurm.store, on_slurm.nodes = beside.store, 2
    on_slurm.settings = settings | {"engine.own_nodes": 1}
    on_slurm.run("train")
    assert_same_training(on_slurm, beside)
    (attempt,) = attempts_of(on_slurm)
    first, second = attempt["nodes"]
    train = on_slurm.run_folder / "train" / "attempts" / "001"
    assert "weights go from 1 ranks to 1" in (train / "trainer0.log").read_text()
    assert "engine 0 started" in (train / f"node-{second}.log").read_text()
    assert "engine 0" not in (train / f"node-{first}.log").read_text()

"""Trainer and engines that sleep while the other works: the run has the bits of one in which nobody sleeps.

On a CPU both are in host memory all the time, but all else is as on GPUs: storages are emptied and filled, engines
forget their weights, checkpoints are written from copies. What GPUs make of it is in `tests/gpu`.
"""

from __future__ import annotations

import json

import pytest
from tests.support.interruptions import assert_same_training
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow
TURNS = {"engine.sleep": "always"}


def test_the_bits_are_those_of_a_run_in_which_nobody_sleeps(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder
) -> None:
    """Two updates a step, a checkpoint in the middle, and two engines of which each has some of the prompts.

    Where nothing is staged before, the job copies what ranks load, and no weights for engines.
    """
    workflow.settings |= TURNS | {"site.node_names": "[]"}
    workflow.run("train")
    there = [path for path in (workflow.folder / "node_local").rglob("*") if path.is_file()]
    copied = [path.name for path in there if not path.is_symlink()]
    assert {"config.json", "metadata.json"} <= {*copied}
    assert not [name for name in copied if name.endswith(".safetensors")]
    assert_same_training(workflow, undisturbed)
    begun = json.loads((workflow.run_folder / "train/checkpoints/begun_from.json").read_text())
    (start,) = (workflow.store / "tiny").glob("*/rollout_start-????????")
    assert start.name in begun
    assert not list(start.glob("*.safetensors")), "no weights, and engines that draft nothing"
    lines = (workflow.run_folder / "train" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(0 < row["perf/asleep_seconds"] < row["perf/step_seconds"] for row in rows)

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
# Where nothing is staged before, the job copies what ranks load, and no weights for engines.
TURNS = {"engine.sleep": "always", "site.node_names": "[]"}


@pytest.mark.faults("slow")
def test_the_bits_are_those_of_a_run_in_which_nobody_sleeps(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder
) -> None:
    """Two updates a step and a checkpoint in the middle; `make test` has it killed on the way (test_resume.py)."""
    workflow.settings |= TURNS
    workflow.run("train")
    assert_same_training(workflow, undisturbed)
    check_turns(workflow)


def check_turns(workflow: WorkflowFolder) -> None:
    """What a run leaves whose trainer and engines took turns."""
    there = [path for path in (workflow.folder / "node_local").rglob("*") if path.is_file()]
    copied = [path.name for path in there if not path.is_symlink()]
    assert {"config.json", "metadata.json"} <= {*copied}
    assert not [name for name in copied if name.endswith(".safetensors")]
    begun = json.loads((workflow.run_folder / "train/checkpoints/begun_from.json").read_text())
    (start,) = (workflow.store / "tiny").glob("*/rollout_start-????????")
    assert start.name in begun
    assert not list(start.glob("*.safetensors")), "no weights, and engines that draft nothing"
    lines = (workflow.run_folder / "train" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(0 < row["perf/asleep_seconds"] < row["perf/step_seconds"] for row in rows)

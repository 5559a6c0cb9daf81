"""A run that begins with another's state: the same bits under the same experiment, a lineage under another."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.report.metrics import without_timings

pytestmark = pytest.mark.slow

LEARNING_RATE = 0.0004


@pytest.fixture
def parent(workflow: WorkflowFolder, undisturbed: WorkflowFolder) -> str:
    """The name of a finished run beside the forks, a copy: what is linked to it must not change it."""
    shutil.copytree(undisturbed.results, workflow.results)
    return workflow.run_folder.name


def metrics_of(workflow: WorkflowFolder, run: str) -> list[dict[str, float]]:
    lines = (workflow.results / run / "train" / "metrics.jsonl").read_text().splitlines()
    return [without_timings(json.loads(line)) for line in lines]


# A trainer and an engine start.
def test_the_same_experiment_ends_with_the_same_bits(
    workflow: WorkflowFolder, undisturbed: WorkflowFolder, parent: str
) -> None:
    workflow.run("train", config={"run": "again", "fork": f"{parent}@2"})
    ours, theirs = workflow.results / "again" / "train", workflow.results / parent / "train"
    assert metrics_of(workflow, "again") == undisturbed.metrics()
    begun = "checkpoints/step_000002"
    assert all(path.samefile(theirs / begun / path.name) for path in (ours / begun).iterdir())
    state, expected = (TorchDistReader(folder / "checkpoints/step_000004") for folder in (ours, theirs))
    assert set(state.keys) == set(expected.keys)
    assert not [key for key in expected.keys if not torch.equal(state.read(key), expected.read(key))]
    assert len((ours / "attempts.jsonl").read_text().splitlines()) == 1, "two steps were trained, and no more"


@pytest.mark.faults("slow")
def test_another_learning_rate_has_a_lineage_in_everything_that_is_told(workflow: WorkflowFolder, parent: str) -> None:
    fork = {"run": "faster", "fork": f"{parent}@2"}
    workflow.settings["optimizer.lr"] = LEARNING_RATE
    workflow.run("all", "verify", config=fork)
    ours, theirs = metrics_of(workflow, "faster"), metrics_of(workflow, parent)
    assert ours[:2] == theirs[:2]
    assert ours[2]["train/lr"] == LEARNING_RATE
    assert ours[3]["train/loss"] != theirs[3]["train/loss"]
    run = workflow.results / "faster"
    assert json.loads((run / "summary.json").read_text())["lineage"] == [{"run": parent, "step": 2}]
    receipt = json.loads((run / "fork.receipt.json").read_text())
    assert list(receipt["settings"]["lineage"][0]["changed"]) == ["optimizer.lr"]
    assert json.loads((run / "train" / "done.json").read_text())["inputs"]["fork"] == receipt["digest"]
    assert f"Forked from <b>{parent}</b> after step 2" in (run / "report.html").read_text()
    assert f"fork of {parent}@2" in workflow.run("status")
    verified = json.loads((run / "verified.json").read_text())["artefacts"]
    (link,) = next(row["made_from"] for row in verified if row["step"] == "fork_checkpoint")
    assert link.endswith("torch_dist"), "the origin, or a copy on a node"
    shutil.rmtree(workflow.results / parent)
    assert "Nothing to be done" in workflow.run("all", config=fork)


def test_a_bad_fork_is_refused_by_the_dry_run(workflow: WorkflowFolder, parent: str) -> None:
    code, output = workflow.attempt(options=["-n"], config={"run": "third", "fork": f"{parent}@3"})
    assert code != 0
    assert f"fork = {parent}@3" in output
    assert "allowed: a step whose checkpoint" in output
    assert "remedy:" in output
    assert "Traceback" not in output
    assert not (workflow.results / "third").exists()

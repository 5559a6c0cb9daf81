"""Exit code 0 means made: whatever is named exists then, after any change of the configuration, at any time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.forked_snakemake import forked_snakemake
from tests.workflow.branches import jobs_of
from tests.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow

# A key of each section that may change while a run goes on.
CHANGES = {
    "evaluation.seed": 99,
    "parallel.num_layers_in_last_pipeline_stage": 4,
    "trainer.save_interval": 1,
    "engine.port": 31000,
    "download.num_workers": 2,
    "convert.num_parts": 3,
    "serving.calibration": "[ranges.json]",
    "stage.copy": "nothing",
    "launch.max_idle_attempts": 5,
    "hardware.memory_gib_per_gpu": 20,
    "site.node_names": "[node0,node7]",
    "logging.wandb_project": "other",
}
# Those by which Snakemake runs a job that training waits for.
DECIDING = ("trainer.save_interval", "site.node_names", "stage.copy")
# target -> what it stands for, below the run's folder.
TARGETS = {
    "resolve_config": "config.resolved.yaml",
    "stage_all_nodes": "node_local.staged",
    "train_grpo": "train/done.json",
    "finalize_export_hf": "hf.receipt.json",
    "evaluation/before.json": "evaluation/before.json",
    "evaluation/after.json": "evaluation/after.json",
    "render_report": "summary.json",
    "all": "summary.json",
}
RULE_OF = {"all": "render_report", "evaluation/before.json": "evaluate", "evaluation/after.json": "evaluate"}
STATES = ("before", "middle", "after training", "after the report")


@pytest.fixture(params=STATES)
def run_at(request: pytest.FixtureRequest, undisturbed: WorkflowFolder, tmp_path: Path) -> WorkflowFolder:
    """A run as it is at some point: with its records of Snakemake, without what comes later."""
    folder = tmp_path / "work"
    shutil.copytree(undisturbed.folder, folder, symlinks=True)
    at, run = STATES.index(request.param), WorkflowFolder(folder, undisturbed.store, dict(undisturbed.settings))
    kept = run.run_folder
    later = ["summary.json", "report.html", "evaluation", "hf", "hf.parts", "hf.receipt.json"]
    gone = {0: [*later, "train"], 1: [*later, "train/done.json"], 2: later, 3: []}
    for name in gone[at]:
        path = kept / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return run


def missing_after(run: WorkflowFolder, target: str, key: str, value: object) -> str:
    """Return what a target stands for, if it is not there and a run would not make it, either."""
    changed = WorkflowFolder(run.folder, run.store, run.settings | {key: value})
    goal = str(run.run_folder / target) if "/" in target else target
    words = changed.command(goal, options=["-n"])[5:]
    code, output = forked_snakemake()(run.folder, *words)
    assert code == 0, output
    is_there = (run.run_folder / TARGETS[target]).exists()
    return "" if is_there or RULE_OF.get(target, target) in jobs_of(output) else f"{target} after {key}={value}"


@pytest.mark.parametrize("key", DECIDING)
def test_what_is_named_and_not_there_is_planned(run_at: WorkflowFolder, key: str) -> None:
    targets = ("train_grpo", "finalize_export_hf", "evaluation/after.json", "all")
    assert [found for target in targets if (found := missing_after(run_at, target, key, CHANGES[key]))] == []


@pytest.mark.faults("answers")
def test_what_is_named_and_not_there_is_planned_for_all_targets_and_sections(run_at: WorkflowFolder) -> None:
    pairs = [(target, *change) for target in TARGETS for change in CHANGES.items()]
    assert [found for pair in pairs if (found := missing_after(run_at, *pair))] == []


def test_it_is_made(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    """Real runs: training with another key than the steps before it had, an export after other nodes are named."""
    run = WorkflowFolder(tmp_path / "work", undisturbed.store, dict(undisturbed.settings))
    run.run("stage_all_nodes", "resolve_config")
    run.settings["trainer.save_interval"] = 1
    run.run("train_grpo")
    assert (run.run_folder / "train" / "done.json").exists()
    assert run.metrics() == undisturbed.metrics()
    run.settings["site.node_names"] = "[node0,node7]"
    run.run("finalize_export_hf")
    assert (run.run_folder / "hf.receipt.json").exists()


def test_success_without_what_was_named_is_none(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    """Should Snakemake plan wrongly all the same, as it does with inputs that it takes for ancient."""
    run = WorkflowFolder(tmp_path / "work", undisturbed.store, dict(undisturbed.settings))
    run.run("stage_all_nodes", "resolve_config")
    run.settings["trainer.save_interval"] = 1
    ancient = ["--consider-ancient", "train_grpo=experiment,resolved,staged", "--nolock"]
    code, output = run.attempt("train_grpo", options=ancient)
    assert "1 of 1 steps (100%) done" in output
    assert code == 1
    assert "this was not made: " in output.splitlines()[-1]
    assert "train/done.json" in output.splitlines()[-1]

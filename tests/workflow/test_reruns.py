"""What a change of the configuration runs again after a finished run, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.branches import jobs_of
from tests.support.forked_snakemake import forked_snakemake
from tests.support.workflow_runs import ROOT, WorkflowFolder

pytestmark = pytest.mark.slow

# The run's files that show the configuration; everything else stands.
SHOWN = {"resolve_config", "render_report"}
# The store was made in another working folder, whose records Snakemake keeps there: see test_hub.py for its own steps.
FETCHED = {"list_hf_checkpoint", "download_hf_checkpoint", "finalize_hf_checkpoint"}
PATCHED = {"patch_hf_config"}
CONVERTED = {"convert_hf_to_torch_dist", "finalize_torch_dist"}
QUANTISED = {"quantize", "finalize_quantized"}
# What a run does before it trains.
STAGED = {"stage_to_node_local", "stage_all_nodes", "approve_data"}
TRAINED = {"train", "export_hf", "finalize_export_hf", "check_export", "evaluate", "render_report"}

SUITE = {
    f"evaluation.suites.some.{key}": value
    for key, value in {"kind": "files", "file": ROOT / "tests/unit/rl/data/forms/gsm8k.jsonl", "num_prompts": 2}.items()
}


def jobs_with(undisturbed: WorkflowFolder, settings: dict[str, object], **config: object) -> set[str]:
    """Return what a dry run would do with some settings changed."""
    changed = WorkflowFolder(undisturbed.folder, undisturbed.store, undisturbed.settings | settings)
    return jobs_of(changed.dry_run(config=config))


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({}, {"nodes": 2}),
        ({}, {"nodes": 2, "hardware": "h200"}),
        ({"site.node_names": "[node0,node1,node2]"}, {}),
        ({"site.node_names": "[other]"}, {}),
        ({"site.node_names": "[]"}, {}),
        ({"engine.num_engines": 2, "engine.port": 30000}, {}),
        ({"trainer.keep_checkpoints": 5, "trainer.save_interval": 1}, {}),
        ({"trainer.num_threads": 2, "logging.wandb_project": "other"}, {}),
        ({"hardware.memory_gib_per_gpu": 0.1}, {}),
        ({"hardware.gpus_per_node": 2, "parallel.tensor_model_parallel_size": 2}, {}),
    ],
    ids=str,
)
def test_topology_and_engineering_train_nothing_again(
    undisturbed: WorkflowFolder, settings: dict[str, object], config: dict[str, object]
) -> None:
    if "parallel.tensor_model_parallel_size" in settings:
        settings = settings | {"parallel.expert_tensor_parallel_size": 2}
    assert jobs_with(undisturbed, settings, **config) == SHOWN


def test_nothing_is_done_without_a_change(undisturbed: WorkflowFolder) -> None:
    assert jobs_with(undisturbed, {}) == set()


def test_another_experiment_is_another_run(undisturbed: WorkflowFolder) -> None:
    before = sorted(path.name for path in undisturbed.results.iterdir())
    changed = WorkflowFolder(undisturbed.folder, undisturbed.store, undisturbed.settings | {"optimizer.lr": 1e-4})
    output = changed.dry_run()
    assert jobs_of(output) == {"resolve_config"} | STAGED | TRAINED, "the store's checkpoints serve both"
    assert undisturbed.run_folder.name not in output
    assert sorted(path.name for path in undisturbed.results.iterdir()) == before


def test_another_experiment_under_the_same_name_is_refused(undisturbed: WorkflowFolder) -> None:
    settings = undisturbed.settings | {"optimizer.lr": 1e-4}
    changed = WorkflowFolder(undisturbed.folder, undisturbed.store, settings)
    code, output = changed.attempt(config={"run": undisturbed.run_folder.name})
    assert code == 1
    assert "optimizer.lr = 0.0001" in output
    assert "0.0002, with which the run" in output
    assert "Traceback" not in output


def test_a_named_run_is_the_same_run(undisturbed: WorkflowFolder) -> None:
    assert jobs_with(undisturbed, {}, run=undisturbed.run_folder.name) == set()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Patch and precision belong to the experiment: the run is another one, the origin's files stay.
        ({"model.patch.target": "deepseek_v32"}, PATCHED | CONVERTED | QUANTISED | STAGED | TRAINED | SHOWN),
        ({"rollout.fp8": "false"}, STAGED | TRAINED | SHOWN),
        ({"data.seed": 8}, {"download_dataset"} | STAGED | TRAINED | SHOWN),
        ({"evaluation.seed": 99}, {"evaluate"} | SHOWN),
        # What is measured between steps belongs to training, and is not made up for afterwards.
        (SUITE | {"evaluation.interval": 1}, {"download_rows", "evaluate"} | SHOWN),
    ],
    ids=["patch", "precision", "data", "evaluation", "suite"],
)
def test_a_setting_runs_its_dependants_and_nothing_else(
    undisturbed: WorkflowFolder, settings: dict[str, object], expected: set[str]
) -> None:
    assert jobs_with(undisturbed, settings) == expected


BUMP = """
from posttrain.store import FORMAT_VERSIONS
FORMAT_VERSIONS[{step!r}] += 1
"""
# A training that is there has its copies; one that is made again brings them up to date itself.
CHECKPOINTS = PATCHED | CONVERTED | QUANTISED | TRAINED


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("make_tiny_model", {"make_tiny_model"} | FETCHED | CHECKPOINTS),
        ("download_hf_checkpoint", FETCHED | CHECKPOINTS),
        ("download_dataset", {"download_dataset"} | TRAINED),
        ("patch_hf_config", CHECKPOINTS),
        ("convert_hf_to_torch_dist", CONVERTED | TRAINED),
        ("finalize_rollout_fp8", QUANTISED | TRAINED),
        ("stage_to_node_local", set()),
        ("train_grpo", TRAINED),  # as receipts call it
        ("export_hf", TRAINED - {"train"}),
        ("check_export", {"check_export", "render_report"}),
        ("evaluate", {"evaluate", "render_report"}),
    ],
)
def test_another_format_runs_its_dependants_and_nothing_else(
    undisturbed: WorkflowFolder, step: str, expected: set[str]
) -> None:
    """A later version of us that writes something else in one step, over results of the present one."""
    words = undisturbed.command(options=["-n"])[3:]
    code, output = forked_snakemake(
        undisturbed.folder, *words, environment=undisturbed.env, before=BUMP.format(step=step)
    )
    assert code == 0, output
    assert jobs_of(output) == expected


def test_changed_topology_keeps_the_results(undisturbed_alone: WorkflowFolder) -> None:
    """A real run: the two jobs that are left do their work, and nothing else is touched."""
    receipts = {path: path.stat().st_mtime_ns for path in receipts_of(undisturbed_alone)}
    changed = WorkflowFolder(
        undisturbed_alone.folder, undisturbed_alone.store, undisturbed_alone.settings | {"trainer.keep_checkpoints": 3}
    )
    output = changed.run()
    assert "GRPO" not in output
    assert receipts == {path: path.stat().st_mtime_ns for path in receipts_of(undisturbed_alone)}
    assert "keep_checkpoints: 3  # set=" in (undisturbed_alone.run_folder / "config.resolved.yaml").read_text()
    undisturbed_alone.run()


def receipts_of(workflow: WorkflowFolder) -> list[Path]:
    """Return everything that says a step is done, in the run and in the store, but for the report."""
    found = [*workflow.store.rglob("*.receipt.json"), *workflow.run_folder.rglob("*[!l].receipt.json")]
    return [*found, workflow.run_folder / "train" / "done.json", *(workflow.run_folder / "evaluation").glob("*.json")]

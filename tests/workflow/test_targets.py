"""Exit code 0 means made: whatever is named exists then, and is what the configuration asks for, at any time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.branches import CONFIG_DIR, jobs_of
from tests.support.forked_snakemake import forked_snakemake
from tests.support.workflow_runs import WorkflowFolder
from tests.workflow.test_answers import ANSWERS
from tests.workflow.test_rules import RULES

from posttrain.config.schema import EXPERIMENT_SECTIONS, Config
from posttrain.plan.resolve import resolve
from posttrain.store import Paths, manifest_of, part_receipt_of, pass_folders, receipt_of

pytestmark = pytest.mark.slow

# A key of each section that may change while a run goes on ...
CHANGES = {
    "nodes": 2,
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
# ... and of each whose change is another run, in another folder.
EXPERIMENTS = {
    "model.patch.target": "deepseek_v32",
    "data.seed": 8,
    "algorithm.clip_ratio_high": 0.3,
    "reward.max_failure_share": 0.1,
    "sandbox.seconds": 20,
    "rollout.temperature": 0.9,
    "quantize.keep_first_layers": 2,
    "optimizer.lr": 1e-4,
    "training.num_steps": 3,
}
SECTIONS_LEFT_OUT = {
    "defaults": "the number of nodes where none is given: `nodes` is given",
    "environment": "limits of episodes, rejected without data.environment: tests/unit/config/test_environment_rules.py",
    "export": "another trainer's checkpoint, with which nothing is trained: tests/end_to_end/test_chain.py",
}
# Every rule with outputs -> what it makes; of a rule with parts, one part.
STORE: dict[str, Callable[[Paths], Path]] = {
    "make_tiny_model": lambda paths: receipt_of(paths.made_model),
    "list_hf_checkpoint": lambda paths: manifest_of(paths.hf),
    "download_hf_checkpoint": lambda paths: part_receipt_of(paths.hf, 0),
    "finalize_hf_checkpoint": lambda paths: receipt_of(paths.hf),
    "download_dataset": lambda paths: receipt_of(paths.dataset),
    "patch_hf_config": lambda paths: receipt_of(paths.hf_patched),
    "convert_hf_to_torch_dist": lambda paths: part_receipt_of(paths.torch_dist, 0),
    "finalize_torch_dist": lambda paths: receipt_of(paths.torch_dist),
    "quantize rollout_fp8": lambda paths: part_receipt_of(paths.rollout_fp8, 0),
    "finalize_quantized rollout_fp8": lambda paths: receipt_of(paths.rollout_fp8),
    "download_rows": lambda paths: receipt_of(pass_folders(paths.resolved.config)["deep"]),
    "calibrate": lambda paths: receipt_of(paths.calibration),
    "quantize serving": lambda paths: part_receipt_of(paths.serving, 0),
    "finalize_quantized serving": lambda paths: receipt_of(paths.serving),
    "quantize bf16": lambda paths: part_receipt_of(paths.bf16, 0),
    "finalize_quantized bf16": lambda paths: receipt_of(paths.bf16),
}
RUN: dict[str, Callable[[Paths], Path]] = {
    "resolve_config": lambda paths: paths.config,
    "fork_checkpoint": lambda paths: paths.fork_receipt,
    "stage_to_node_local": lambda paths: paths.node_record("node0"),
    "stage_all_nodes": lambda paths: paths.run / "node_local.staged",
    "approve_data": lambda paths: receipt_of(paths.data_check),
    "train": lambda paths: paths.train_done,
    "export_hf": lambda paths: part_receipt_of(paths.hf_export, 0),
    "finalize_export_hf": lambda paths: receipt_of(paths.hf_export),
    "check_export": lambda paths: paths.export_check,
    "evaluate before": lambda paths: paths.evaluation("before"),
    "evaluate": lambda paths: paths.evaluation("after"),
    "render_report": lambda paths: paths.summary,
}
PRODUCTS = STORE | RUN
RULES_LEFT_OUT = {
    "all": "has no outputs: it stands for the report, and is named below",
    **dict.fromkeys(
        ("finalize_rollout_fp8", "finalize_serving", "finalize_bf16"),
        "have no outputs: they name what finalize_quantized makes",
    ),
    "ask_precision": "makes what compare_precisions reads: tests/workflow/test_answers.py asks for that",
    "lm_eval": "needs lm-eval's environment: tests/scripts/test_lm_eval.py makes it, anew after a changed key",
    "approve_environment": "exists only where an agent is trained: tests/workflow/test_approved_environment.py",
    "adopt_torch_dist": "exists only where a checkpoint is adopted: golden/tiny_adopted_torch_dist.txt plans it",
}
# What is named at once -> what has to be made then. A rule with parts is named by a file.
GOALS = {
    "store": tuple(STORE),
    "resolve_config": ("resolve_config",),
    "fork_checkpoint": ("fork_checkpoint",),
    "stage_all_nodes": ("stage_to_node_local", "stage_all_nodes"),
    "approve_data": ("approve_data",),
    "train": ("train",),
    "finalize_export_hf": ("export_hf", "finalize_export_hf"),
    "check_export": ("check_export",),
    "evaluate before": ("evaluate before",),
    "evaluate": ("evaluate",),
    "all": ("render_report",),
}
SHOWN = {"resolve_config", "render_report"}
PATCHED = {"patch_hf_config", "convert_hf_to_torch_dist", "finalize_torch_dist"}
FP8, SERVING = (
    {f"{rule} {name}" for rule in ("quantize", "finalize_quantized")} for name in ("rollout_fp8", "serving")
)
QUANTISED = FP8 | SERVING
# Key -> what is another thing after its change, and so no longer made, besides the files that show every key.
# An experiment changes all of its run. Where a run lies, in how many parts it is written, and when: no content.
ALTERED = {
    "evaluation.seed": {"evaluate before", "evaluate"},
    "serving.calibration": SERVING,
    "data.seed": {"download_dataset"},
    "model.patch.target": PATCHED | QUANTISED,
    "quantize.keep_first_layers": FP8,
}
# A finished run keeps the copies that it had.
ALTERED_BEFORE_TRAINING_ENDS = {"site.node_names": {"stage_all_nodes"}, "stage.copy": {"stage_all_nodes"}}
STATES = ("before", "middle", "after training", "after the report")


@pytest.fixture(params=STATES)
def run_at(request: pytest.FixtureRequest, undisturbed_alone: WorkflowFolder) -> Iterator[WorkflowFolder]:
    """A run as it is at some point: without what comes later, which is laid aside."""
    with laid_aside(undisturbed_alone, STATES.index(request.param)):
        yield undisturbed_alone


@contextlib.contextmanager
def laid_aside(run: WorkflowFolder, at: int) -> Iterator[None]:
    """Take away what comes after a state; no copy, as Snakemake's records are of absolute paths."""
    later = ["summary.json", "report.html", "evaluation/after.json", "hf", "hf.parts", "hf.receipt.json"]
    later += ["export_check.json", "export_check.json.receipt.json"]
    gone = {0: [*later, "evaluation", "train"], 1: [*later, "train/done.json"], 2: later, 3: []}[at]
    aside, kept, ranges = run.folder / "aside", run.run_folder, run.folder / "ranges.json"
    aside.mkdir()
    ranges.touch()  # A dry run asks no more of an input.
    for number, name in enumerate(gone):
        (kept / name).rename(aside / str(number))
    try:
        yield
    finally:
        for number, name in reversed(list(enumerate(gone))):
            (aside / str(number)).rename(kept / name)
        aside.rmdir()
        ranges.unlink()


def words_of(goal: str, paths: Paths) -> list[str]:
    """Return what is named on the command line: rules, and files of those that make several."""
    if goal == "all":
        return ["all"]
    by_file = {name for name in GOALS[goal] if " " in name or "{" in name_of_output(name)}
    return [str(PRODUCTS[name](paths)) if name in by_file else name for name in GOALS[goal]]


def name_of_output(product: str) -> str:
    """Return the outputs of a product's rule as the workflow writes them."""
    return RULES[product.split()[0]].partition("output:")[2].partition("log:")[0]


def altered_by(key: str, run: WorkflowFolder) -> set[str]:
    """Return what a change makes another thing, at the point where a run is."""
    altered = ALTERED.get(key, set()) | (set(RUN) if key in EXPERIMENTS else SHOWN)
    is_trained = (run.run_folder / "train" / "done.json").exists()
    return altered | (set() if is_trained else ALTERED_BEFORE_TRAINING_ENDS.get(key, set()))


def wrong_after(run: WorkflowFolder, goal: str, key: str, value: object) -> list[str]:
    """Return what of a goal is not there or is another thing after a change, and a run would not make it, either."""
    config = {"fork": f"{run.run_folder.name}@2", "run": "forked"} if goal == "fork_checkpoint" else {}
    changed = WorkflowFolder(run.folder, run.store, run.settings | ({key: value} if "." in key else {}))
    earlier, now = (paths_of(folder, config) for folder in (run, changed))
    # The number of nodes chooses files, so it is no override, and no path has it.
    choice = config | ({} if "." in key else {key: str(value)})
    words = changed.command(*words_of(goal, now), config=choice, options=["-n"])[5:]
    code, output = forked_snakemake(run.folder, *words)
    assert code == 0, output
    planned, altered = jobs_of(output), altered_by(key, run)

    def holds(name: str) -> bool:
        before, after = (PRODUCTS[name](paths) for paths in (earlier, now))
        return name.split()[0] in planned or (after.exists() and (name not in altered or before != after))

    return [f"{name} after {key}={value}" for name in GOALS[goal] if not holds(name)]


def paths_of(run: WorkflowFolder, config: dict[str, str]) -> Paths:
    """Return where the files lie of a run that the command line describes."""
    words = run.command(config=config)
    choice = dict(word.split("=", 1) for word in words[words.index("--config") + 1 :])
    return Paths(resolve({"model": "tiny", "site": "local", **choice}, CONFIG_DIR))


def cases(run: WorkflowFolder) -> Iterator[tuple[str, str, object]]:
    """Yield (goal, key, value) of all that is to be asked; the store and other runs are the same in every state."""
    is_begun, is_finished = ((run.run_folder / name).exists() for name in ("train", "summary.json"))
    for goal in GOALS:
        if (goal == "fork_checkpoint" and not is_begun) or (goal == "store" and not is_finished):
            continue
        yield from ((goal, *change) for change in CHANGES.items())
        if goal in ("store", "all") and is_finished:
            yield from ((goal, *change) for change in EXPERIMENTS.items())


def test_every_rule_with_outputs_and_every_section_has_a_case() -> None:
    made = {name.split()[0] for name in PRODUCTS}
    assert (RULES.keys() - ANSWERS) ^ made == RULES_LEFT_OUT.keys()
    assert {name for names in GOALS.values() for name in names} == PRODUCTS.keys()
    sections = {field.name for field in dataclasses.fields(Config)}
    changed = [key.split(".")[0] for key in CHANGES | EXPERIMENTS]
    assert sections ^ set(changed) == SECTIONS_LEFT_OUT.keys()
    assert {key.split(".")[0] for key in EXPERIMENTS} == set(EXPERIMENT_SECTIONS) - SECTIONS_LEFT_OUT.keys()
    keys = CHANGES.keys() | EXPERIMENTS.keys()
    assert ALTERED.keys() | ALTERED_BEFORE_TRAINING_ENDS.keys() <= keys


@pytest.mark.faults("answers")
def test_what_is_named_is_there_or_planned_for_all_targets_and_sections(run_at: WorkflowFolder) -> None:
    assert [found for case in cases(run_at) for found in wrong_after(run_at, *case)] == []


@pytest.mark.parametrize(
    ("at", "goal", "key"),
    [
        ("before", "train", "trainer.save_interval"),
        ("after training", "finalize_export_hf", "site.node_names"),
        ("after the report", "all", "data.seed"),
        ("after the report", "store", "quantize.keep_first_layers"),
    ],
)
def test_what_is_named_is_there_or_planned(undisturbed_alone: WorkflowFolder, at: str, goal: str, key: str) -> None:
    """A few cases of all; what is planned here is made in `test_it_is_made`."""
    with laid_aside(undisturbed_alone, STATES.index(at)):
        assert wrong_after(undisturbed_alone, goal, key, (CHANGES | EXPERIMENTS)[key]) == []


@pytest.mark.faults("slow")
def test_it_is_made(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    """Real runs: training with another key than the steps before it had, an export after other nodes are named."""
    run = WorkflowFolder(tmp_path / "work", undisturbed.store, dict(undisturbed.settings))
    run.run("stage_all_nodes", "resolve_config")
    run.settings["trainer.save_interval"] = 1
    run.run("train")
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
    ancient = ["--consider-ancient", "train=experiment,resolved,staged", "--nolock"]
    code, output = run.attempt("train", options=ancient)
    assert "1 of 1 steps (100%) done" in output
    assert code == 1
    assert "this was not made: " in output.splitlines()[-1]
    assert "train/done.json" in output.splitlines()[-1]

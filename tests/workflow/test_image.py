"""Which commands start in the site's image, and how: rendered by a dry run, and really started by a stand-in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.image_runtimes import ImageRuntime
from tests.support.workflow_runs import ROOT, WorkflowFolder, run_snakemake
from tests.workflow.test_rules import RULES, WITHOUT_WORK

from posttrain.__main__ import module_of
from posttrain.store import read_receipt

# What a dry run of these would do has one command of each rule but for those that only look or depend on a setting.
TARGETS = ("all", "verify", "verify_store", "gc", "plan", "status", "benchmark_serving", "verify_rollout_weights")
# These find their nodes themselves, and start ranks in the image there.
STARTS_RANKS = {"train": "ON_ALL_NODES", "calibrate": "CALIBRATED_ON_PODS"}
ON_THE_DRIVER = {name for name, text in RULES.items() if re.search(r"^\s*localrule: True$", text, re.MULTILINE)}


def commands(folder: Path, settings: str) -> dict[str, str]:
    """Return what stands before `python` in the command of each rule, by rule."""
    words = ("--config", "site=example_slurm", f"set=site.results={folder}/results {settings}")
    ended = run_snakemake(folder, "-n", "--printshellcmds", *TARGETS, *words)
    assert ended.returncode == 0, ended.stdout
    program = r"(?:\S+/scripts/(\w+)\.py|-P -m posttrain (\S+))"
    found = re.findall(rf"POSTTRAIN_LOG=\S+ (.*?)python {program}", ended.stdout)
    return {script or command.replace("-", "_"): prefix for prefix, script, command in found}


def test_all_jobs_but_training_start_in_the_image(tmp_path: Path) -> None:
    settings = "site.container.runtime=apptainer site.container.image=/shared/cpu.sif site.store=/shared/store"
    shown = ",".join(f"{folder}:{folder}" for folder in (tmp_path, ROOT, "/shared/store"))
    before = f"apptainer exec --bind {shown} --pwd {tmp_path} /shared/cpu.sif env PYTHONPATH={ROOT}/workflow/src "
    found = commands(tmp_path, settings)
    assert {"make_tiny_model", "finalize_torch_dist", "evaluate", "export_hf", "verify"} <= found.keys()
    outside = ON_THE_DRIVER | {"train"}
    assert {"resolve_config", "render_report", "train"} <= outside & found.keys()
    assert found == {rule: "" if rule in outside else before for rule in found}


def test_pyxis_gets_a_step_of_its_own(tmp_path: Path) -> None:
    settings = "site.container.runtime=pyxis site.container.image=/shared/cpu.sqsh site.container.mounts=[/data]"
    found = commands(tmp_path, f"{settings} site.store=/data/store")
    assert found["finalize_torch_dist"] == (
        "srun --overlap --nodes 1 --ntasks 1 --mem 0 --cpu-bind none --container-image=/shared/cpu.sqsh"
        f" --container-mounts={tmp_path}:{tmp_path},{ROOT}:{ROOT},/data:/data --container-workdir={tmp_path}"
        f" env PYTHONPATH={ROOT}/workflow/src "
    )


def test_without_an_image_nothing_stands_before_python(tmp_path: Path) -> None:
    assert set(commands(tmp_path, "").values()) == {""}


@pytest.mark.parametrize("rule", sorted(RULES.keys() - WITHOUT_WORK))
def test_every_rule_says_where_it_starts(rule: str) -> None:
    """Also those that no dry run above has: a new rule that becomes a job must not be forgotten."""
    (name,) = re.findall(r'\bruns\(\s*"(\w+)"', RULES[rule])
    assert name == rule
    where = re.findall(r"\bwhere=(\w+)", RULES[rule])
    if rule in STARTS_RANKS:
        assert where == [STARTS_RANKS[rule]]
    elif rule in ON_THE_DRIVER | {"preflight"}:
        assert where == []
    else:
        assert where in (["IN_IMAGE"], ["WHERE_SERVED"], ["ON_ONE_NODE"])


def test_what_starts_outside_needs_a_small_environment() -> None:
    names = sorted(ON_THE_DRIVER - WITHOUT_WORK | {*STARTS_RANKS, "preflight"})
    heavy = {"torch", "megatron", "transformers"}
    modules = [name if (ROOT / "scripts" / f"{name}.py").exists() else module_of(name) for name in names]
    modules.append("posttrain.cluster.beside_engines")
    code = (
        f"import sys; sys.path.insert(0, 'scripts'); import {', '.join(modules)}; print({heavy} & sys.modules.keys())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert len(names) > 5
    assert ended.stdout == "set()\n"


def test_a_step_runs_through_the_runtime(tmp_path: Path) -> None:
    """Into folders that were not there before; a secret is on no command line, and reaches the step."""
    runtime = ImageRuntime(tmp_path / "runtime", "apptainer")
    environment = runtime.environment | {"HF_TOKEN": "hf_secret"}
    settings = {"site.node_local": "/nowhere/posttrain", **runtime.settings}
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings, environment)
    workflow.run("download_dataset", config={"site": "slurm_localhost"})
    (receipt,) = (tmp_path / "store" / "datasets").glob("*.receipt.json")
    assert read_receipt(receipt).step == "download_dataset"
    (words,) = runtime.calls()
    assert words[-1] == str(receipt)
    assert words[words.index("python") + 1].endswith("/scripts/download_dataset.py")
    assert not [word for word in words if "hf_secret" in word]


def test_an_image_that_is_not_there_is_told(tmp_path: Path) -> None:
    runtime = ImageRuntime(tmp_path / "runtime", "apptainer")
    runtime.image.unlink()
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", runtime.settings, runtime.environment)
    code, output = workflow.attempt("download_dataset", config={"site": "slurm_localhost"})
    assert code == 1
    assert f"FATAL: {runtime.image} does not exist" in output

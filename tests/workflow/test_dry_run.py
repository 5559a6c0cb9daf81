"""Plain `snakemake -n` of every branch: what it would do, and what it must not do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.dry_run import GOAL, GOAL_OF_MANY_JOBS, MANY_JOBS, NODES, measure, ratios_of
from tests.support.branches import OTHER_BRANCHES, dry_run, job_table, main_branches, refused_branches
from tests.support.workflow_runs import ROOT, run_snakemake

GOLDEN = Path(__file__).parent / "golden"
BRANCHES = main_branches() | OTHER_BRANCHES


def compare(path: Path, text: str) -> None:
    """Compare with a golden file; UPDATE_GOLDEN=1 writes it instead, for review with `git diff`."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 pytest tests/workflow writes it anew"


@pytest.mark.parametrize("name", BRANCHES)
def test_jobs_of_a_branch(name: str, tmp_path: Path) -> None:
    code, output = dry_run(tmp_path, BRANCHES[name])
    assert code == 0, output
    compare(GOLDEN / f"{name}.txt", job_table(output))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".snakemake" not in path.parts]
    assert [path.parent.name for path in files] == ["configs"], "a dry run writes what it has resolved, and no more"


@pytest.mark.faults("slow")
def test_combinations_that_are_refused() -> None:
    compare(GOLDEN / "refused.json", json.dumps(refused_branches(), indent=2) + "\n")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(BRANCHES)


def test_the_default_is_the_tiny_model(tmp_path: Path) -> None:
    code, output = dry_run(tmp_path, {})
    assert code == 0
    assert job_table(output) == (GOLDEN / "tiny.txt").read_text()


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_nothing_heavy_is_imported(model: str, tmp_path: Path) -> None:
    """The interpreter itself lists what it imports."""
    ended = run_snakemake(tmp_path, "-n", "--config", f"model={model}", python_options=["-X", "importtime"])
    rows = [line for line in ended.stdout.splitlines() if line.startswith("import time:")]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in rows}
    assert {"snakemake", "posttrain", "omegaconf"} <= packages
    heavy = {"torch", "transformers", "megatron", "safetensors", "huggingface_hub", "wandb", "aiohttp"}
    assert not packages & heavy


def test_from_another_folder_and_a_path_with_a_space(tmp_path: Path) -> None:
    """Commands stay right: the first rule runs, with the workflow's folder under another name."""
    (tmp_path / "a workflow").symlink_to(ROOT)
    work = tmp_path / "work here"
    work.mkdir()
    snakefile = tmp_path / "a workflow" / "Snakefile"
    ended = run_snakemake(work, "--cores", "1", "resolve_config", snakefile=snakefile)
    assert ended.returncode == 0, ended.stdout
    (run,) = (work / "results").iterdir()
    assert sorted(path.name for path in run.iterdir()) == ["config.resolved.yaml", "experiment.yaml"]


def test_the_name_of_a_run(tmp_path: Path) -> None:
    """It follows from the experiment alone; a user may give another."""
    named = dry_run(tmp_path, {"run": "mine"})[1]
    assert "write the configuration of mine" in named
    default = job_table(dry_run(tmp_path, {})[1])
    assert job_table(dry_run(tmp_path, {"set": "engine.num_engines=2 site.results=elsewhere"})[1]) == default
    run = next(line.split()[-1] for line in default.splitlines() if "write the configuration" in line)
    other = job_table(dry_run(tmp_path, {"set": "optimizer.lr=3e-4"})[1])
    assert run not in other
    assert default.count("tiny-") == other.count("tiny-")


@pytest.mark.faults("slow")
def test_a_dry_run_is_fast(tmp_path: Path) -> None:
    """At most 2.5 times a one-rule workflow; benchmarks/dry_run.py has the exact figure on a quiet machine."""
    ratios = ratios_of(measure(tmp_path, {"tiny": {}, "glm5": {"model": "glm5"}}, repeats=3))
    assert {name: ratio for name, ratio in ratios.items() if ratio > GOAL} == {}


def test_many_nodes_and_jobs_are_planned(tmp_path: Path) -> None:
    """128 nodes and 1,000 jobs."""
    code, output = dry_run(tmp_path, MANY_JOBS)
    assert code == 0, output
    jobs = {line.split()[0]: int(line.split()[1]) for line in job_table(output).split("\n\n")[0].splitlines()}
    assert jobs["total"] >= 1000
    assert jobs["stage_to_node_local"] == NODES
    assert f"on h200 ({NODES} nodes, {NODES * 8:,} GPUs, about " in output


@pytest.mark.faults("slow")
def test_many_nodes_and_jobs_are_planned_fast(tmp_path: Path) -> None:
    """At most 6 times a one-rule workflow."""
    assert ratios_of(measure(tmp_path, {"many": MANY_JOBS}, repeats=3))["many"] <= GOAL_OF_MANY_JOBS

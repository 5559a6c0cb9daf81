"""The workflow as its users know workflows: listed, and as a module of their own in another folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.branches import jobs_of
from tests.support.forked_snakemake import forked_snakemake
from tests.support.workflow_runs import ROOT, WorkflowFolder
from tests.workflow.test_rules import RULES

MINE = f"""
configfile: "mine.yaml"

module posttrain:
    snakefile: "{ROOT}/Snakefile"
    config: config["posttrain"]

use rule * from posttrain as posttrain_*

onstart:
    posttrain.onstart()

rule mine:
    default_target: True
    input: rules.posttrain_all.input
    output: "mine.txt"
    shell: "touch {{output}}"
"""
ANOTHER = """
module another:
    snakefile: "{snakefile}"
    config: {{"model": "tiny", "site": "local", "set": "training.num_steps=5"}}

use rule * from another as another_*
"""


@pytest.fixture
def mine(tmp_path: Path):
    """Return what runs Snakemake with a workflow that imports this one."""
    (tmp_path / "Snakefile").write_text(MINE)
    (tmp_path / "mine.yaml").write_text("posttrain: {model: tiny, site: local}\n")

    def run(*words: str) -> tuple[int, str]:
        return forked_snakemake(tmp_path, *words, "--snakefile", str(tmp_path / "Snakefile"), "--cores", "2")

    return run


WITH_ALL_RULES = ("download.torch_dist_folder=somewhere", "data.environment=calculator", "data.reward=environment")


def test_every_rule_is_listed_with_a_line_of_its_own(tmp_path: Path) -> None:
    code, output = forked_snakemake(tmp_path, "--list", "--config", f"set={' '.join(WITH_ALL_RULES)}")
    assert code == 0
    listed = dict(re.findall(r"^(\w+) \((.{10,})\)$", output, re.MULTILINE))
    assert listed.keys() == RULES.keys()
    assert len(set(listed.values())) == len(RULES)


def test_a_workflow_that_imports_it_plans_the_same_jobs(mine, tmp_path: Path) -> None:
    code, output = mine("-n")
    assert code == 0, output
    code, ours = forked_snakemake(tmp_path, "-n")
    assert code == 0
    assert jobs_of(output) == {f"posttrain_{rule}" for rule in jobs_of(ours)} | {"mine"}


def test_its_jobs_run_where_it_is_imported(mine, tmp_path: Path) -> None:
    code, output = mine("posttrain_resolve_config", "posttrain_download_dataset")
    assert code == 0, output
    # A command of its own: it waits for nothing, and might look before there is a run.
    code, output = mine("posttrain_status")
    assert code == 0, output
    (run,) = (tmp_path / "results").iterdir()
    assert (run / "experiment.yaml").exists()
    assert list((tmp_path / "resources" / "datasets").glob("sort_digits-*/train.jsonl"))
    assert f"{run.name}" in output
    assert "0 of 80" in output


def test_what_its_config_leaves_out_has_defaults(mine, tmp_path: Path) -> None:
    """Snakemake skips our `configfile:` for a module with a `config:`."""
    (tmp_path / "mine.yaml").write_text("posttrain: {set: training.num_steps=5}\nother: 1\nother: 2\n")
    code, output = mine("-n")
    assert code == 0, output
    assert jobs_of(output) > {"posttrain_train", "mine"}
    (tmp_path / "Snakefile").write_text(MINE.replace('config["posttrain"]', '{"model": "tiny"}'))
    code, output = mine("-n")
    assert code == 0, output


def test_what_cannot_run_is_refused_there_too(mine) -> None:
    code, output = mine("--config", "posttrain={model: deepseek_v3.2}")
    assert code == 1
    assert "this version cannot run what is asked for:" in output
    assert not re.search(r"^Job \d", output, re.MULTILINE)


def test_a_second_configuration_in_one_workflow_is_refused(mine, tmp_path: Path) -> None:
    """Rules may be taken in several statements, for which Snakemake reads the Snakefile again."""
    snakefile = tmp_path / "Snakefile"
    snakefile.write_text(MINE + 'use rule status from posttrain as look with:\n    message: "look"\n')
    assert mine("-n", "look")[0] == 0
    snakefile.write_text(MINE + ANOTHER.format(snakefile=ROOT / "Snakefile"))
    code, output = mine("-n")
    assert code == 1
    assert "module = two configurations of posttrain" in output


@pytest.mark.slow
def test_snakemakes_own_report_shows_what_a_run_has_brought(undisturbed_alone: WorkflowFolder, tmp_path: Path) -> None:
    page = tmp_path / "snakemake.html"
    words = undisturbed_alone.command(options=["--report", str(page)])[5:]
    code, output = forked_snakemake(undisturbed_alone.folder, *words)
    assert code == 0, output
    added = re.findall(r"^Adding .*?([\w.]+) \(", output, re.MULTILINE)
    assert sorted(added) == ["after.json", "before.json", "report.html", "summary.json"]
    assert "Evaluation" in page.read_text()

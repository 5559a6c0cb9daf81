"""`snakemake snapshot`: the report of a run so far, drawn each time that it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.synthetic_run import SyntheticRun, make_run, workflow_of
from tests.workflow_runs import ROOT, run_snakemake


@pytest.fixture
def made(tmp_path: Path) -> SyntheticRun:
    """A run of twelve steps that has done seven."""
    made = make_run(tmp_path, num_steps=12)
    made.paths.train_done.unlink()
    made.paths.evaluation("after").unlink()
    rows = made.paths.metrics.read_text().splitlines(keepends=True)
    made.paths.metrics.write_text("".join(rows[:7]))
    (made.paths.run / "later.jsonl").write_text("".join(rows[7:]))
    (made.paths.run / "report.html").write_text("an earlier report")
    return made


def test_asked_again_a_step_later_the_step_is_on_it(made: SyntheticRun) -> None:
    later = (made.paths.run / "later.jsonl").read_text().splitlines(keepends=True)
    # Whoever asks knows the run by its name, and need not say what it learns.
    choice = [f"run={made.paths.run.name}", "model=tiny", f"set=site.results={made.paths.run.parent}"]
    for step in (7, 8):
        done = run_snakemake(made.paths.run.parents[1], "snapshot", "--cores", "1", "--config", *choice)
        assert done.returncode == 0, done.stdout
        assert f"so far {step} of 12 steps; not there yet: the end of training, the evaluation after" in done.stdout
        assert f"snapshot: {made.paths.snapshot}" in done.stdout
        page = made.paths.snapshot.read_text()
        assert f"<b>So far</b>: {step} steps of 12, as of " in page
        assert "Not there yet: the end of training, the evaluation after training." in page
        assert "optimizer.lr" in page, "the run's own configuration"
        with open(made.paths.metrics, "a") as metrics:
            metrics.write(later[step - 7])
    assert (made.paths.run / "report.html").read_text() == "an earlier report", "it is Snakemake's"


def test_before_anything_has_begun_and_after_all_is_done(tmp_path: Path) -> None:
    finished = make_run(tmp_path / "finished", num_steps=4)
    for workflow, page, words in (
        (workflow_of(tmp_path, 5), tmp_path / "results" / "*" / "snapshot.html", "<b>So far</b>: 0 steps of 5"),
        (finished.workflow, finished.paths.snapshot, "<h2>The model got better</h2>"),
    ):
        command = [sys.executable, ROOT / "scripts/snapshot.py", "--config-dir", ROOT / "config"]
        done = subprocess.run(
            [*command, "--workflow", json.dumps(workflow)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (found,) = Path("/").glob(str(page).lstrip("/"))
        assert words in found.read_text()
        assert done.stdout.splitlines()[-1] == f"snapshot: {found}"
    assert "So far" not in finished.paths.snapshot.read_text()
    assert not finished.paths.summary.exists(), "it is Snakemake's"

"""`posttrain snapshot`: the report of a run so far, drawn each time that it is asked for."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_programs import run_posttrain
from tests.support.resolved_words import resolved_words
from tests.support.synthetic_run import make_run, workflow_of


def test_before_anything_has_begun_and_after_all_is_done(tmp_path: Path) -> None:
    finished = make_run(tmp_path / "finished", num_steps=4)
    for workflow, page, words in (
        (workflow_of(tmp_path, 5), tmp_path / "results" / "*" / "snapshot.html", "<b>So far</b>: 0 steps of 5"),
        (finished.workflow, finished.paths.snapshot, "<h2>The model got better</h2>"),
    ):
        done = run_posttrain("snapshot", *resolved_words(workflow, tmp_path), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        (found,) = Path("/").glob(str(page).lstrip("/"))
        assert words in found.read_text()
        assert done.stdout.splitlines()[-1] == f"snapshot: {found}"
    assert "So far" not in finished.paths.snapshot.read_text()
    assert not finished.paths.summary.exists(), "it is Snakemake's"

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.synthetic_run import make_run

from posttrain.report.report import render_report
from posttrain.report.report_data import RunData, read_run
from posttrain.report.report_figures import learning_charts
from posttrain.report.report_summary import summarize
from posttrain.report.suite_results import suite_rows
from posttrain.report.verdict import judge_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read_run(make_run(tmp_path_factory.mktemp("run"), num_steps=20).inputs)


def result(rate: float, count: int = 200) -> dict[str, Any]:
    lengths = {"response_tokens_mean": 5.0, "truncated_fraction": 0.0}
    return {"pass_rate": rate, "num_prompts": count, "pass_at": {"1": [rate, 0.0, 1.0]}, **lengths}


def measured(run: RunData, *rates: float) -> RunData:
    """Return the run with a suite that had these pass rates before, between and after."""
    assert run.before is not None
    assert run.after is not None
    first, *between, last = rates
    before, after = (
        {**of_run, "suites": {"sums": result(rate)}} for of_run, rate in ((run.before, first), (run.after, last))
    )
    found = [(5 * place, {"sums": result(rate)}) for place, rate in enumerate(between, start=1)]
    return dataclasses.replace(run, before=before, after=after, between=found)


def test_a_run_without_suites_has_no_rows(run: RunData) -> None:
    assert suite_rows(run) == []
    assert "Suites" not in render_report(run, summarize(run), judge_run(run))


def test_every_moment_has_its_place(run: RunData) -> None:
    heldout, sums = suite_rows(measured(run, 0.2, 0.3, 0.5, 0.6))
    assert [one.when for one in sums.measured] == ["before", "after 5 steps", "after 10 steps", "after"]
    assert (heldout.name, [one.when for one in heldout.measured]) == ("heldout", ["before", "after"])
    assert sums.change is not None
    assert sums.change[0] == pytest.approx(0.4)
    assert sums.worse == []


def test_a_regression_is_marked_where_it_is_more_than_chance(run: RunData) -> None:
    worse = measured(run, 0.6, 0.58, 0.3, 0.4)
    assert suite_rows(worse)[1].worse == ["after 10 steps", "after"]
    assert ("warning", "Worse at sums") in [(finding.level, finding.title) for finding in judge_run(worse).findings]
    page = render_report(worse, summarize(worse), judge_run(worse))
    assert page.count('<b class="worse">worse</b>') == 2
    regained = measured(run, 0.6, 0.3, 0.58)
    assert suite_rows(regained)[1].worse == ["after 5 steps"]
    assert "Worse" not in judge_run(regained).headline + "".join(f.title for f in judge_run(regained).findings)


def test_what_was_measured_between_steps_is_read(tmp_path: Path) -> None:
    made = make_run(tmp_path, num_steps=20)
    folder = made.inputs.run_folder / "train" / "evaluations"
    folder.mkdir()
    (folder / "step_000010.json").write_text('{"finished": 10, "exams": {"sums": {"pass_rate": 0.5}}}')
    assert read_run(made.inputs).between == [(10, {"sums": {"pass_rate": 0.5}})]


def test_rewards_of_suites_are_drawn_where_answers_get_partial_credit(run: RunData) -> None:
    rows = [row | {"evaluation/sums/pass_rate": 0.1, "evaluation/sums/reward_mean": 0.4} for row in run.rows]
    titles = [chart.title for chart in learning_charts(dataclasses.replace(run, rows=rows))]
    assert "Suites" in titles
    assert "Mean reward of suites" not in titles
    assert run.after is not None
    partial = dataclasses.replace(run, rows=rows, after=run.after | {"has_partial_credit": True})
    assert "Mean reward of suites" in [chart.title for chart in learning_charts(partial)]

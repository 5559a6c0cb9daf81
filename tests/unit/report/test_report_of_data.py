"""What a report tells of one's own data and rewards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.synthetic_run import make_run

from posttrain.report.report import pair_samples, render_report
from posttrain.report.report_data import RunData, read_run
from posttrain.report.report_figures import learning_charts
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import judge_run
from posttrain.store import Receipt, receipt_of, record_files, write_json, write_receipt

CHECK = {
    "problems": [],
    "warnings": [{"key": "data.label_key", "value": "stands in its prompt", "allowed": "", "remedy": "take it out"}],
    "prompt_tokens": {"shortest": 3, "median": 41, "longest": 1977},
    "left_out": [4, 9],
    "labels": [
        {
            "source": "maths",
            "grader": "math",
            "num_rows": 7473,
            "own": 0.998,
            "other": None,
            "stated": "\\boxed{{label}}",
        }
    ],
    "verdicts": [
        {
            "source": "",
            "grader": "polite",
            "highest": {"response": "thank you <b>", "score": 0.75},
            "lowest": None,
        }
    ],
}


def page_of(run: RunData) -> str:
    return render_report(run, summarize(run), judge_run(run))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    made = make_run(tmp_path_factory.mktemp("run"), num_steps=6)
    write_json(made.paths.data_check, CHECK)
    return read_run(made.inputs)


def test_what_was_found_before_training(run: RunData) -> None:
    page = page_of(run)
    for told in ("3 to 1,977 tokens", "half of them at most 41", "2 prompts over the limit", "7,473", "99.8 %"):
        assert told in page
    assert "thank you &lt;b&gt;" in page
    assert "stands in its prompt: take it out." in page
    assert 'href="#data"' in page


def test_a_run_without_a_check_has_no_such_section(run: RunData) -> None:
    assert 'id="data"' not in page_of(dataclasses.replace(run, data_check=None))


def test_what_scripted_agents_earned_is_a_table(run: RunData) -> None:
    agents = [{"agent": "says nothing", "rewards": [0.0, 0.25, None]}]
    found = {"agents": agents, "not_tried": {"edits the tests": "a function that writes"}, "problems": []}
    page = page_of(dataclasses.replace(run, environment_check=found))
    assert 'href="#environment"' in page
    assert "<td>says nothing</td>" in page
    assert "0 0.25 –" in page
    assert "Not tried: an agent that edits the tests; it needs a function that writes." in page
    assert 'id="environment"' not in page_of(run)


def test_sources_and_graders_have_a_line_each(run: RunData) -> None:
    names = ("source/a/pass_rate", "source/b/pass_rate", "reward/math", "reward/own.py:polite")
    rows = [{**row, **{name: (row["step"] + place) / 40 for place, name in enumerate(names)}} for row in run.rows]
    charts = {chart.title: chart for chart in learning_charts(dataclasses.replace(run, rows=rows))}
    assert [series.label for series in charts["Pass rate by source"].series] == ["a", "b"]
    assert [series.label for series in charts["Scores"].series] == ["math", "own.py:polite"]
    assert "Scores" not in {chart.title for chart in learning_charts(run)}


@pytest.mark.parametrize("label", [7, {"a": [1]}, ["x", "y"], 0.5, True])
def test_labels_of_any_type_and_responses_without_a_reward_are_shown(run: RunData, label: Any) -> None:
    example = {"prompt": "p", "response": "r", "label": label, "reward": None, "failure": "math: not graded within 2 s"}
    graded = {**example, "reward": 1.0, "failure": None}
    (pair,) = pair_samples([example], [graded])
    assert (pair.label, pair.change) == (json.dumps(label), "better")
    page = page_of(dataclasses.replace(run, before={**run.before, "examples": [example]}))
    assert "not graded within 2 s" in page


def test_what_lm_eval_found_is_a_table_once_its_receipt_is_there(tmp_path: Path) -> None:
    made = make_run(tmp_path, num_steps=6)
    result = made.paths.lm_eval("after")
    row = {"task": "gsm8k", "metric": "exact_match", "filter": "strict-match", "value": 0.4375, "stderr": None}
    write_json(result, {"results": [{**row, "num_rows": 32}]})
    assert 'id="lm-eval"' not in page_of(read_run(made.inputs))
    write_receipt(receipt_of(result), Receipt("lm_eval", record_files(result.parent, [result.name]), {}, {}))
    run = read_run(made.inputs)
    page = page_of(run)
    assert 'href="#lm-eval"' in page
    for told in ("gsm8k", "strict-match", "0.4375", ">32<"):
        assert told in page
    assert "evaluation lm_eval_after" in {artefact.name for artefact in run.artefacts}

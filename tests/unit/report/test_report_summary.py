import dataclasses
import json

import pytest
from tests.support.synthetic_run import make_run

from posttrain.report.report_data import RuleTime, read_run
from posttrain.report.report_summary import busy_seconds, print_summary, sum_by_rule, summarize

STABLE_KEYS = {
    "pass_rate_before",
    "pass_rate_after",
    "reward_mean_before",
    "reward_mean_after",
    "scores_before",
    "scores_after",
    "num_steps",
    "mismatch_abs_diff_mean",
    "mismatch_quantised_abs_diff_mean",
    "seconds_total",
    "seconds_by_rule",
    "tokens_per_second",
    "final_weights_sha256",
}


def time_of(rule, start, end):
    return RuleTime(rule, "job", end - start, end, None)


def test_side_by_side_counts_once_and_pauses_do_not_count():
    times = [time_of("a", 0, 10), time_of("b", 5, 12), time_of("c", 100, 101), time_of("d", 2, 3)]
    assert busy_seconds(times) == 13
    assert busy_seconds([]) == 0


def test_jobs_of_a_rule_add_up_in_the_order_of_the_rules():
    times = [time_of("late", 20, 21), time_of("parts", 0, 4), time_of("parts", 1, 3)]
    assert list(sum_by_rule(times).items()) == [("parts", 6), ("late", 1)]


def test_the_stable_keys_with_numbers_of_the_run(tmp_path, capsys):
    made = make_run(tmp_path, num_steps=10)
    run = read_run(made.inputs)
    summary = summarize(run)
    assert set(summary) >= STABLE_KEYS
    assert (summary["pass_rate_before"], summary["pass_rate_after"], summary["num_steps"]) == (
        0.264,
        0.931,
        10,
    )
    rows = [json.loads(line) for line in (made.paths.train / "metrics.jsonl").read_text().splitlines()]
    tokens, seconds = (sum(row[name] for row in rows) for name in ("train/num_tokens", "perf/step_seconds"))
    assert summary["tokens_per_second"] == pytest.approx(tokens / seconds, abs=1e-3)
    assert summary["response_tokens_per_second"] == pytest.approx(10 * 1280 / seconds, abs=1e-3)
    assert summary["mismatch_abs_diff_mean"] == pytest.approx(sum(row["mismatch/abs_diff_mean"] for row in rows) / 10)
    assert summary["seconds_by_rule"]["evaluate"] == 23.0
    # The made-up jobs ran one after the other.
    assert summary["seconds_total"] == pytest.approx(sum(summary["seconds_by_rule"].values()), abs=0.01)
    print_summary(summary)
    printed = capsys.readouterr().out
    assert summary["final_weights_sha256"] in printed
    assert "26.4 %" in printed


def test_what_was_not_measured_is_null(tmp_path):
    made = make_run(tmp_path, num_steps=3)
    path = made.paths.train / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(("mismatch/", "perf/"))} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    summary = summarize(read_run(made.inputs))
    assert summary["mismatch_abs_diff_mean"] is None
    assert summary["tokens_per_second"] is None


def test_partial_credit_stands_on_the_terminal(tmp_path, capsys):
    run = read_run(make_run(tmp_path, num_steps=10).inputs)
    graded = {"reward_mean": 0.331, "has_partial_credit": True, "scores": {"digits": 0.25}}
    summary = summarize(dataclasses.replace(run, before=run.before | graded, after=run.after | graded))
    print_summary(summary)
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    assert ["mean reward before", "0.331"] in rows
    assert ["digits after", "0.250"] in rows

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.synthetic_run import make_run

from posttrain.report.intervals import rate_change, wilson
from posttrain.report.report import render_report
from posttrain.report.report_data import RunData, read_run
from posttrain.report.report_summary import summarize
from posttrain.report.verdict import Finding, Verdict, judge_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return read_run(make_run(tmp_path_factory.mktemp("run"), num_steps=20).inputs)


def rated(rate: float, count: int) -> dict[str, Any]:
    return {"pass_rate": rate, "num_prompts": count}


def with_rows(run: RunData, **columns: list[float]) -> RunData:
    """Return the run with these metrics in every step, "rollout_reward_mean" for "rollout/reward_mean"."""
    rows = [{**row} for row in run.rows]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            row[name.replace("_", "/", 1)] = value
    return dataclasses.replace(run, rows=rows)


def levels(run: RunData) -> list[tuple[str, str]]:
    return [(finding.level, finding.title) for finding in judge_run(run).findings]


@pytest.mark.parametrize(
    ("before", "after", "interval"),
    [
        # Newcombe (1998), table II, method 10.
        ((48 / 80, 80), (56 / 70, 70), (0.2, 0.0524, 0.3339)),
        ((3 / 10, 10), (9 / 10, 10), (0.6, 0.1705, 0.8090)),
        ((0 / 29, 29), (5 / 56, 56), (0.0893, -0.0381, 0.1926)),
        ((0 / 20, 20), (0 / 10, 10), (0.0, -0.1611, 0.2775)),
        ((0 / 10, 10), (10 / 10, 10), (1.0, 0.6075, 1.0)),
    ],
)
def test_the_interval_is_that_of_the_paper(
    before: tuple[float, int], after: tuple[float, int], interval: tuple[float, float, float]
) -> None:
    assert rate_change(rated(*before), rated(*after)) == pytest.approx(interval, abs=6e-5)
    change, low, high = rate_change(rated(*after), rated(*before))
    assert (-change, -high, -low) == pytest.approx(interval, abs=6e-5)


def test_wilsons_interval() -> None:
    """Newcombe, Two-sided confidence intervals for the single proportion (1998), table I: 81 of 263, 15 of 148."""
    assert wilson(81 / 263, 263) == pytest.approx((81 / 263, 0.2553, 0.3662), abs=6e-5)
    assert wilson(15 / 148, 148) == pytest.approx((15 / 148, 0.0624, 0.1605), abs=6e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.0, 0.1611), abs=6e-5)


@pytest.mark.parametrize(
    ("before", "after", "level", "title"),
    [
        (0.264, 0.931, "good", "The model got better"),
        (0.931, 0.264, "bad", "The model got worse"),
        (0.50, 0.53, "warning", "No statistically significant change"),
        (0.53, 0.50, "warning", "No statistically significant change"),
        (0.0, 0.0, "warning", "No statistically significant change"),
    ],
)
def test_learning_is_told_from_chance(run: RunData, before: float, after: float, level: str, title: str) -> None:
    changed = dataclasses.replace(run, before=rated(before, 512), after=rated(after, 512))
    verdict = judge_run(changed)
    assert (verdict.level, verdict.headline) == (level, title)
    (finding,) = verdict.findings
    assert f"{100 * before:.1f} % → {100 * after:.1f} % on 512 held-out prompts" in finding.detail
    assert bool(finding.remedy) == (level != "good")


def evaluated(rows: list[tuple[float, float]], **others: Any) -> dict[str, Any]:
    """Return a result of four samples per prompt, of which each has a pass rate and a mean reward."""
    rates, rewards = zip(*rows, strict=True)
    return {
        "pass_rate": sum(rates) / len(rows),
        "reward_mean": sum(rewards) / len(rows),
        "num_prompts": len(rows),
        "num_samples": 4,
        "has_partial_credit": rates != rewards,
        "by_prompt": [[prompt, *row] for prompt, row in enumerate(rows)],
        "examples": [],
        **others,
    }


def test_partial_credit_is_judged_by_the_mean_reward(run: RunData) -> None:
    """Half of the digits right instead of a third, while hardly any response is right as a whole."""
    low = [(0.0, 0.28 + 0.01 * (prompt % 11)) for prompt in range(128)]
    high = [(0.25 if prompt == 5 else 0.0, 0.70 + 0.01 * (prompt % 11)) for prompt in range(128)]
    better = dataclasses.replace(
        run,
        before=evaluated(low, scores={"digits": 0.3, "format-1": -0.5}),
        after=evaluated(high, scores={"digits": 0.75, "format-1": 0.5}),
    )
    verdict = judge_run(better)
    assert (verdict.level, verdict.headline) == ("good", "The model got better")
    assert verdict.findings[0].detail == (
        "mean reward 0.329 → 0.749 on 128 held-out prompts: +0.420, with 95 % confidence +0.396 to +0.420; "
        "pass rate 0.0 % → 0.2 %: +0.2 points, with 95 % confidence −0.5 to +1.1; "
        "digits 0.300 → 0.750; format-1 −0.500 → 0.500"
    )
    worse = dataclasses.replace(run, before=better.after, after=better.before)
    assert (judge_run(worse).level, judge_run(worse).headline) == ("bad", "The model got worse")
    summary = summarize(better)
    assert (summary["reward_mean_before"], summary["scores_after"]) == (
        pytest.approx(0.3289, abs=1e-4),
        {"digits": 0.75, "format-1": 0.5},
    )
    page = render_report(better, summary, verdict)
    assert "mean reward before: <b>0.329</b>; of digits 0.300, format-1 -0.500" in page
    assert "held-out mean rewards" in page


def test_a_reward_that_rises_while_fewer_responses_pass_is_a_warning(run: RunData) -> None:
    before = evaluated([(1.0, 0.5)] * 64)
    hacked = dataclasses.replace(run, before=before, after=evaluated([(0.5, 0.9)] * 64))
    assert levels(hacked) == [("warning", "Fewer responses pass"), ("good", "The model got better")]
    finding = judge_run(hacked).findings[0]
    assert finding.detail.startswith("pass rate 100.0 % → 50.0 %: −50.0 points")
    assert finding.remedy.startswith("the reward pays for something else than right answers")
    same = dataclasses.replace(run, before=before, after=evaluated([(0.5, 0.5)] * 64))
    assert levels(same) == [("warning", "No statistically significant change"), ("warning", "Fewer responses pass")]


def test_rewards_of_0_and_1_are_told_once(run: RunData) -> None:
    rows = [(0.25, 0.25), (0.75, 0.75)] * 32
    once = dataclasses.replace(run, before=evaluated(rows), after=evaluated([(1.0, 1.0)] * 64))
    assert "reward" not in judge_run(once).findings[0].detail
    summary = summarize(once)
    assert summary["reward_mean_after"] is None
    assert "mean reward after" not in render_report(once, summary, judge_run(once))


def test_the_change_is_told_with_its_ends(run: RunData) -> None:
    changed = dataclasses.replace(run, before=rated(0.6, 80), after=rated(0.5, 80))
    (finding,) = judge_run(changed).findings
    assert finding.detail.endswith("−10.0 points, with 95 % confidence −24.7 to +5.3")


def test_a_run_whose_rewards_were_all_equal_has_learned_nothing(tmp_path: Path) -> None:
    for reward, what in (
        (0.0, "tells whether data.reward can read the labels"),
        (1.0, "prompts that the model gets right now and then"),
    ):
        made = make_run(tmp_path / str(reward), num_steps=5, reward=reward)
        verdict = judge_run(read_run(made.inputs))
        assert (verdict.level, verdict.headline) == ("bad", "Nothing was learned")
        assert len(verdict.findings) == 1, "that nothing changed follows from it"
        assert f"every reward was {reward:g}" in verdict.findings[0].detail
        assert "in all of 5 steps" in verdict.findings[0].detail
        assert what in verdict.findings[0].remedy


def test_a_model_that_got_worse_without_a_lesson_is_told_beside_it(run: RunData) -> None:
    worse = dataclasses.replace(run, before=rated(0.9, 512), after=rated(0.2, 512))
    found = levels(with_rows(worse, rollout_reward_std_zero_fraction=[1.0] * 20))
    assert found == [("bad", "Nothing was learned"), ("bad", "The model got worse")]


def test_hardly_any_difference_of_rewards_is_a_warning(run: RunData) -> None:
    for share, found in ((1.0, "Nothing was learned"), (0.95, "Hardly anything"), (0.9, "Hardly anything"), (0.89, "")):
        changed = with_rows(run, rollout_reward_std_zero_fraction=[share] * 20, rollout_reward_mean=[0.2, 0.3] * 10)
        titles = " ".join(title for _, title in levels(changed))
        assert found in titles if found else "learned" not in titles and "Hardly" not in titles
    # One step with a lesson is enough not to have learned nothing.
    shares = [1.0] * 19 + [0.9]
    changed = with_rows(run, rollout_reward_std_zero_fraction=shares, rollout_reward_mean=[0.2, 0.3] * 10)
    (finding,) = [finding for finding in judge_run(changed).findings if finding.title.startswith("Hardly")]
    assert finding.level == "warning"
    assert finding.detail == "over 20 steps, 99.5 % of all groups had equal rewards; mean rewards of 0.2 to 0.3"


def test_an_engine_with_other_weights_is_loud(run: RunData) -> None:
    """The limits of the small model: 0.1 with FP8 weights, 1e-4 where both compute in FP32 with the same ones."""
    quiet = with_rows(run, mismatch_quantised_abs_diff_mean=[0.1] * 20, mismatch_abs_diff_mean=[1e-4] * 20)
    assert levels(quiet) == [("good", "The model got better")]
    attacked = with_rows(run, mismatch_quantised_abs_diff_mean=[0.02] * 3 + [0.71] * 2 + [0.02] * 15)
    verdict = judge_run(attacked)
    assert (verdict.level, verdict.headline) == ("bad", "The engine did not sample from the policy")
    assert verdict.findings[0].detail == (
        "mean |trainer − engine| with the trainer's own weights was above 0.1 nats in 2 of 20 measured steps, first in "
        "step 4; the largest was 0.71"
    )
    assert verdict.findings[0].remedy.startswith("an engine had other weights than it should")
    assert [finding.level for finding in verdict.findings] == ["bad", "good"]
    wrong = with_rows(run, mismatch_abs_diff_mean=[0.029] * 20)
    assert "with the weights served was above 1.00e-04 nats in 20 of 20" in judge_run(wrong).findings[0].detail


def test_rounding_is_told_from_other_weights(run: RunData) -> None:
    """One step of twenty at twice the limit, where the weights served were right."""
    rare, right = [0.02] * 19 + [0.2], [1e-4] * 20
    rounded = with_rows(run, mismatch_quantised_abs_diff_mean=rare, mismatch_abs_diff_mean=right)
    assert levels(rounded) == [
        ("warning", "Rounded weights were far from the policy"),
        ("good", "The model got better"),
    ]
    finding = judge_run(rounded).findings[0]
    assert finding.detail.endswith(
        "was above 0.1 nats in 1 of 20 measured steps, first in step 20; the largest was 0.2"
    )
    assert finding.remedy.startswith("one step may be chance")
    served_is_unknown = dataclasses.replace(
        run, rows=[{name: value for name, value in row.items() if name != "mismatch/abs_diff_mean"} for row in run.rows]
    )
    for other in (
        with_rows(rounded, mismatch_quantised_abs_diff_mean=[0.2]),
        with_rows(rounded, mismatch_quantised_abs_diff_mean=[0.02] * 19 + [0.2001]),
        with_rows(rounded, mismatch_abs_diff_mean=[2e-4]),
        with_rows(served_is_unknown, mismatch_quantised_abs_diff_mean=rare),
    ):
        assert levels(other)[0] == ("bad", "The engine did not sample from the policy")


def test_what_was_left_out_is_told(run: RunData) -> None:
    assert levels(with_rows(run, train_non_finite_steps=[0] * 10 + [1] * 5 + [3] * 5))[0] == (
        "warning",
        "Updates were left out",
    )
    skipped = judge_run(with_rows(run, train_non_finite_steps=[0] * 10 + [1] * 5 + [3] * 5)).findings[0]
    assert skipped.detail.startswith("3 updates had")
    missed = judge_run(with_rows(run, rollout_grader_failures=[0, 1, 1] + [0] * 17)).findings[0]
    assert (missed.level, missed.detail[:11]) == ("warning", "2 responses")
    assert skipped.remedy == "a lower optimizer.lr may help"
    assert missed.remedy.startswith("the samples in train/rollouts say why")


def test_while_it_trains_the_rewards_are_told(run: RunData) -> None:
    for before, after in ((run.before, None), (None, run.after), (None, None)):
        going_on = with_rows(
            dataclasses.replace(run, before=before, after=after), rollout_reward_mean=[0.25] * 10 + [0.5] * 10
        )
        assert levels(going_on) == [("unknown", "Not known yet whether it learns")]
        detail = judge_run(going_on).findings[0].detail
        assert detail == "mean reward 0.250 in the first 10 steps, 0.500 in the last"
    for count, detail in ((0, "0 steps, and"), (1, "1 step, and"), (3, "0.250 in the first 1 step, 0.750 in the last")):
        few = with_rows(dataclasses.replace(run, after=None), rollout_reward_mean=[0.25, 0.5, 0.75])
        assert detail in judge_run(dataclasses.replace(few, rows=few.rows[:count])).findings[0].detail


def test_the_worst_comes_first_and_decides() -> None:
    findings = [Finding(level, level, "") for level in ("good", "bad", "warning", "unknown")]
    assert [Verdict("h", findings[:1]).level, Verdict("h", findings).level] == ["good", "bad"]
    assert Verdict("h", []).level == "good"
    assert Verdict("h", [findings[0], findings[2], findings[3]]).level == "warning"
    assert Verdict("h", [findings[3], findings[0]]).level == "unknown"


def test_it_is_printed_and_kept(run: RunData, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(
        "What [it] is", [Finding("bad", "What [it] is", "a [detail]", "do [this]"), Finding("good", "b", "c")]
    )
    verdict.print()
    assert capsys.readouterr().out == "What [it] is\n  a [detail]\n    do [this]\n  b: c\n"
    Verdict("h", [Finding("good", "b", "a long " * 40 + "detail")]).print()
    assert capsys.readouterr().out == f"h\n  b: {'a long ' * 40}detail\n", "a terminal breaks lines, and nobody else"
    assert json.loads(json.dumps(verdict.as_dict())) == {
        "level": "bad",
        "headline": "What [it] is",
        "findings": [
            {"level": "bad", "title": "What [it] is", "detail": "a [detail]", "remedy": "do [this]"},
            {"level": "good", "title": "b", "detail": "c", "remedy": ""},
        ],
    }


def test_an_export_that_was_not_checked_is_told(run: RunData) -> None:
    title = "The export was not checked"
    assert title not in dict(map(reversed, levels(run)))
    unchecked = dataclasses.replace(run, export_check={"check": "off"})
    assert ("warning", title) in levels(unchecked)
    (finding,) = [finding for finding in judge_run(unchecked).findings if finding.title == title]
    assert finding.detail.startswith("export.check=off: transformers has not loaded it")
    assert finding.remedy == "run `snakemake check_export` with export.check=auto"
    assert title not in dict(map(reversed, levels(dataclasses.replace(run, export_check={"check": "layers"}))))

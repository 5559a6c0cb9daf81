import math

import pytest

from posttrain.report.metrics import METRICS, check_metrics, without_timings


def test_all_timings_and_only_they_are_under_perf():
    assert {name for name, metric in METRICS.items() if metric.is_timing} == {
        n for n in METRICS if n.startswith(("perf/", "queue/"))
    }


def test_finite_numbers_of_known_names_pass():
    check_metrics({"train/loss": -0.25, "train/num_tokens": 12, "mismatch/kl_k3": 0.0})


def test_every_unknown_name_and_every_bad_value_is_named_at_once():
    values = {
        "train/los": 1.0,
        "train/loss": math.nan,
        "train/grad_norm": math.inf,
        "train/lr": True,
        "train/clip_fraction": "x",
    }
    with pytest.raises(ValueError, match="metrics refused") as caught:
        check_metrics(values)
    text = str(caught.value)
    assert "train/los: no such metric" in text
    for name in ("train/loss = nan", "train/grad_norm = inf", "train/lr = True", "train/clip_fraction = 'x'"):
        assert f"{name}: not a finite number" in text


def test_rows_that_differ_in_timings_only_compare_equal():
    first = {"step": 3, "train/loss": 0.5, "perf/step_seconds": 1.0}
    second = {"step": 3, "train/loss": 0.5, "perf/step_seconds": 2.0, "perf/save_seconds": 0.1}
    assert without_timings(first) == without_timings(second) == {"step": 3, "train/loss": 0.5}

"""The table of attainable rates against training runs that it is not fitted on."""

import pytest
from benchmarks.published_training import ANCHORS, OTHERS, TOLERANCE, forecast, main

FORECASTS = [forecast(run) for run in (*ANCHORS, *OTHERS)]


def test_the_anchors_are_met():
    bridge, glm, qwen = (forecast(run) for run in ANCHORS)
    assert bridge.figure == pytest.approx(48.6, abs=0.1)
    assert glm.figure == pytest.approx(27.7, abs=0.1)
    assert qwen.figure == pytest.approx(37.2, abs=0.1)
    assert max(abs(row.error) for row in (bridge, glm, qwen)) < TOLERANCE


@pytest.mark.parametrize("row", FORECASTS, ids=lambda row: row.run.name)
def test_what_is_off_says_what_is_missing(row):
    assert (abs(row.error) > TOLERANCE) == bool(row.run.missing), f"{row.error:+.0%}"


def test_nothing_takes_longer_than_published():
    """Rates are attainable ones: a run may lose time that they do not know, and never gains any."""
    assert all(row.error > 0 for row in FORECASTS if row.run.slower == 1)


def test_the_table_names_every_run_and_what_costs_most(capsys):
    main()
    printed = capsys.readouterr().out
    for row in FORECASTS:
        assert row.run.name in printed
        assert next(iter(row.causes)) in printed

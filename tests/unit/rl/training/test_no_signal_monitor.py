import logging

import pytest

from posttrain.rl.training.no_signal_monitor import NoSignalMonitor


@pytest.mark.parametrize(
    ("metric", "words"),
    [("rollout/reward_std_zero_fraction", "ALL REWARDS EQUAL"), ("rollout/truncated_fraction", "ALL ANSWERS CUT")],
)
def test_steps_in_a_row_without_a_lesson_are_loud(metric: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = NoSignalMonitor()
    for _ in range(4):
        assert watch.note({metric: 1.0}) == ""
    assert watch.note({metric: 0.9}) == "", "one lesson is enough"
    with caplog.at_level(logging.WARNING):
        notes = [watch.note({metric: 1.0}) for _ in range(6)]
    assert notes[:-2] == [""] * 4
    assert notes[-2:] == [f", {words} for {count} steps" for count in (5, 6)]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{words.lower()} for 5 steps: nothing is learned; ")
    assert "check-data" in record.getMessage()


def test_ranks_without_metrics_say_nothing() -> None:
    watch = NoSignalMonitor()
    assert [watch.note({}) for _ in range(10)] == [""] * 10

import logging

import pytest

from posttrain.training.lessons import NUM_STEPS, LessonWatch


@pytest.mark.parametrize(
    ("metric", "words"),
    [("rollout/reward_std_zero_fraction", "ALL REWARDS EQUAL"), ("rollout/truncated_fraction", "ALL ANSWERS CUT")],
)
def test_steps_in_a_row_without_a_lesson_are_loud(metric: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = LessonWatch()
    for _ in range(NUM_STEPS - 1):
        assert watch.note({metric: 1.0}) == ""
    assert watch.note({metric: 0.9}) == "", "one lesson is enough"
    with caplog.at_level(logging.WARNING):
        notes = [watch.note({metric: 1.0}) for _ in range(NUM_STEPS + 1)]
    assert notes[:-2] == [""] * (NUM_STEPS - 1)
    assert notes[-2:] == [f", {words} for {count} steps" for count in (NUM_STEPS, NUM_STEPS + 1)]
    (record,) = caplog.records
    assert "check-data" in record.getMessage()


def test_ranks_without_metrics_say_nothing() -> None:
    watch = LessonWatch()
    assert [watch.note({}) for _ in range(10)] == [""] * 10

import pytest

from posttrain.evaluation.serving import RequestTimes, format_table, summarize_level


def test_a_level_by_hand():
    times = [RequestTimes(0.1, 0.5, 5), RequestTimes(0.2, 0.4, 5), RequestTimes(0.3, 1.1, 5)]
    level = summarize_level(2, times, seconds=1.5)
    assert (level.concurrency, level.num_requests) == (2, 3)
    assert level.output_tokens_per_second == pytest.approx(10)
    assert (level.ttft_ms_median, level.ttft_ms_p99) == (pytest.approx(200), pytest.approx(300))
    # 400, 200 and 800 ms for the 4 tokens after the first
    assert level.tpot_ms_median == pytest.approx(100)
    assert level.latency_ms_median == pytest.approx(500)


def test_a_response_of_one_token_has_no_time_between_tokens():
    assert RequestTimes(0.2, 0.2, 1).per_output_token == 0


def test_the_table_has_one_line_per_level():
    level = summarize_level(8, [RequestTimes(0.1, 0.5, 5)], seconds=1.0)
    header, row = format_table([level]).splitlines()
    assert header.split()[0] == "concurrency"
    assert len(header) == len(row)
    assert row.split() == ["8", "5.0", "100.0", "100.0", "100.0", "500.0"]

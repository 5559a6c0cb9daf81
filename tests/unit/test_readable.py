import pytest

from posttrain.readable import (
    as_text,
    counted,
    decade_ticks,
    format_bytes,
    format_cost,
    format_number,
    format_percent,
    format_seconds,
    format_tick,
    nice_ticks,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (80, "80"),
        (4857.3, "4,857"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (3.1e-7, "3.10e-07"),
        (-0.5, "−0.5"),
        (743_911_199_232, "743,911,199,232"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (7.31, "7.3 s"),
        (59.96, "1 min 00 s"),
        (192, "3 min 12 s"),
        (7265, "2 h 01 min"),
        (172_799, "47 h 59 min"),
        (172_800, "2.0 days"),
        (2_487_900, "28.8 days"),
    ],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


def test_bytes_and_shares():
    assert [format_bytes(value) for value in (0, 999, 1000, 63_826, 1.5e12, 999.6e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "63.8 kB",
        "1.5 TB",
        "1000 GB",
    ]
    assert (format_percent(0.2637), format_percent(1.0), format_percent(None)) == ("26.4 %", "100.0 %", "–")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        ("", ""),
        (True, "true"),
        (None, "null"),
        (3, "3"),
        (1e-6, "1e-06"),
        ([], ""),
        (["node0"], "node0"),
        (("a", "b", "b"), "a, 2 × b"),
        ([0, 0, 0, 1], "3 × 0, 1"),
    ],
)
def test_values_of_a_configuration(value, text):
    assert as_text(value) == text


def test_money_and_counts():
    costs = [format_cost(value, "EUR") for value in (None, 0.5, 99.99, 100, 331_752.4)]
    assert costs == ["–", "0.50 EUR", "99.99 EUR", "100 EUR", "331,752 EUR"]
    assert [counted(number, "node") for number in (0, 1, 2, 1024)] == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.011, 0.008, [-0.015, -0.01, -0.005, 0, 0.005, 0.01]),
        (1, 80, [0, 20, 40, 60, 80]),
        (0, 10, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_decades_cover_the_range_with_few_ticks():
    assert decade_ticks(3e-7, 0.02) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    wide = decade_ticks(1e-14, 1.0)
    assert len(wide) <= 8
    assert wide[0] <= 1e-14
    assert wide[-1] >= 1.0


def test_tick_labels_tell_neighbours_apart():
    assert [format_tick(value) for value in (0, 0.2, 20000, 3e6, 5e-5, 1.5e-4, -0.015)] == [
        "0",
        "0.2",
        "20k",
        "3M",
        "5e-5",
        "1.5e-4",
        "−0.015",
    ]

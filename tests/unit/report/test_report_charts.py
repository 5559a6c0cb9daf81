import json
import xml.etree.ElementTree as ElementTree

import pytest

from posttrain.report.report_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LINE_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Series,
    running_mean,
    spread,
)


def draw(chart):
    return ElementTree.fromstring(str(chart.svg()))


def points(path):
    return [tuple(map(float, pair.split(","))) for pair in path.attrib["d"].removeprefix("M").split("L")]


def lines(svg):
    return [element for element in svg.iter("path") if "line" in element.attrib["class"].split()]


def test_a_line_goes_through_its_points():
    svg = draw(Chart("t", "n", "u", [Series("a", [0, 5, 10], [0.0, 1.0, 0.5])], low=0.0, high=1.0))
    (line,) = lines(svg)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = LEFT + (right - LEFT) / 2
    assert points(line) == [
        (LEFT, bottom),
        (middle, TOP),
        (right, pytest.approx(TOP + (bottom - TOP) / 2, abs=0.06)),
    ]


def test_a_logarithmic_axis_has_equal_decades_and_draws_zero_at_its_lower_end():
    svg = draw(Chart("t", "n", "u", [Series("a", [0, 1, 2, 3], [1e-4, 1e-2, 1.0, 0.0])], is_log=True))
    heights = [y for _, y in points(lines(svg)[0])]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[3] == heights[0] == HEIGHT - BOTTOM


def test_bars_stack_to_the_sum_and_do_not_leave_the_axes():
    series = [Series("a", [1, 2], [1.0, 2.0], 1), Series("b", [1, 2], [3.0, 0.0], 2)]
    svg = draw(Chart("t", "n", "s", series, low=0.0, is_stacked=True))
    bars = [element for element in svg.iter("rect") if "bar" in element.attrib["class"].split()]
    assert len(bars) == 3  # a layer of 0 is not drawn
    scale = (HEIGHT - TOP - BOTTOM) / 4
    assert [float(bar.attrib["height"]) for bar in bars] == pytest.approx([scale, 3 * scale, 2 * scale], abs=0.1)
    assert float(bars[1].attrib["y"]) == pytest.approx(TOP, abs=0.1)
    assert min(float(bar.attrib["x"]) for bar in bars) >= LEFT
    assert max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in bars) <= WIDTH - RIGHT


def test_a_long_run_is_drawn_as_means_of_stretches():
    steps = list(range(1, 3001))
    chart = Chart("t", "n", "u", [Series("a", steps, [float(step) for step in steps])])
    assert chart.steps_per_point == 8
    data = json.loads(draw(chart).attrib["data-values"])
    assert len(data["series"][0]["steps"]) == 375
    assert data["series"][0]["steps"][0] == 8
    assert data["series"][0]["values"][0] == pytest.approx(4.5)
    assert sum(data["series"][0]["values"]) / 375 == pytest.approx(1500.5)


def test_smoothing_draws_the_values_and_their_mean():
    noisy = [float(index % 2) for index in range(40)]
    drawn = lines(draw(Chart("t", "n", "u", [Series("a", range(40), noisy, smooth=True)])))
    assert ["faint" in line.attrib["class"] for line in drawn] == [True, False]
    assert running_mean([0.0, 3.0, 6.0, 9.0], 1) == [1.5, 3.0, 6.0, 7.5]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1.0 - 1e-9])
def test_constant_values_and_a_single_step_have_axes(value):
    for steps in ([1], [1, 2, 3]):
        svg = draw(Chart("t", "n", "u", [Series("a", steps, [value] * len(steps))]))
        labels = [
            text.text
            for text in svg.iter("text")
            if text.attrib["class"] == "tick" and text.attrib["text-anchor"] == "end"
        ]
        assert len(labels) == len(set(labels)) >= 2


def test_reference_lines_are_inside_the_axes_and_labelled_beside_them():
    chart = Chart("t", "n", "u", [Series("a", [1, 2], [0.1, 0.2])], references=[(0.9, "limit <1>"), (0.88, "goal")])
    svg = draw(chart)
    lines_of_it = [line for line in svg.iter("line") if line.attrib["class"] == "reference"]
    labels = {text.text: text.attrib for text in svg.iter("text") if text.attrib["class"] == "reference-label"}
    assert list(labels) == ["limit <1>", "goal"]
    for line in lines_of_it:
        assert TOP <= float(line.attrib["y1"]) == float(line.attrib["y2"]) <= HEIGHT - BOTTOM
        assert (float(line.attrib["x1"]), float(line.attrib["x2"])) == (LEFT, pytest.approx(WIDTH - RIGHT - 9 * 6.8))
        assert all(float(label["x"]) > float(line.attrib["x2"]) for label in labels.values())
    heights = [float(label["y"]) for label in labels.values()]
    assert heights[1] - heights[0] == pytest.approx(LINE_HEIGHT)


@pytest.mark.parametrize(
    ("wanted", "heights"),
    [
        ([], []),
        ([50], [50]),
        ([120], [100]),
        ([10, 12, 90], [10, 28, 90]),
        ([12, 10], [28, 10]),
        ([95, 99], [82, 100]),
        ([100, 100, 100], [64, 82, 100]),
        ([10, 28], [10, 28]),
    ],
)
def test_labels_are_spread(wanted, heights):
    assert spread(wanted, 18, 100) == heights


def test_a_chart_whose_lines_do_not_change_is_flat():
    flat, rising = Series("a", [1, 2], [0.5, 0.5]), Series("b", [1, 2], [0.5, 0.6])
    assert Chart("t", "n", "u", [flat]).is_flat
    assert Chart("t", "n", "u", [flat, Series("b", [1], [3.0])]).is_flat
    assert not Chart("t", "n", "u", [flat, rising]).is_flat
    assert not Chart("t", "n", "u", [rising, flat]).is_flat


def test_no_text_becomes_markup():
    nasty = "</text><script>'\"&amp;<!--"
    chart = Chart(nasty, nasty, nasty, [Series(nasty, [1, 2], [0.0, 1.0])], references=[(0.5, nasty)], x_label=nasty)
    svg = draw(chart)
    assert "<script" not in str(chart.svg())
    texts = [text.text for text in svg.iter("text")]
    assert texts.count(nasty) == 3
    assert svg.attrib["aria-label"] == f"{nasty}: {nasty} over {nasty}s"
    data = json.loads(svg.attrib["data-values"])
    assert (data["x"], data["series"][0]["label"]) == (nasty, nasty)

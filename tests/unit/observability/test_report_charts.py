import json
import xml.etree.ElementTree as ElementTree

import pytest

from posttrain.observability.report_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Series,
    running_mean,
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


def test_reference_lines_are_inside_the_axes_and_labelled():
    chart = Chart("t", "n", "u", [Series("a", [1, 2], [0.1, 0.2])], references=[(0.9, "limit <1>")])
    svg = draw(chart)
    (reference,) = [line for line in svg.iter("line") if line.attrib["class"] == "reference"]
    assert TOP <= float(reference.attrib["y1"]) <= HEIGHT - BOTTOM
    assert "limit <1>" in [text.text for text in svg.iter("text")]

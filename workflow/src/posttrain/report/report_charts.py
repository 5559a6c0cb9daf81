"""Charts as inline SVG: lines over steps, stacked bars over steps. No script is needed to see them.

Colours are classes (`c1` .. `c7`) with a light and a dark value in the page's style sheet, so a chart follows the
reader's colour scheme and prints well. Each chart embeds its values as JSON, from which the page's script shows the
numbers under the pointer. Long runs are drawn as means over equal ranges of steps, with at most `MAX_POINTS` points
per line. Text is placed outside the plot area; `Markup` escapes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from posttrain.readable import decade_ticks, format_tick, nice_ticks

WIDTH, WIDE_WIDTH, HEIGHT = 420.0, 868.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 16.0, 26.0, 38.0
# Width of the labels of reference lines. On a narrow screen wide charts shrink, but their text does not.
LETTER_WIDTH, WIDE_LETTER_WIDTH, LINE_HEIGHT = 6.8, 9.0, 18.0
# About one point per pixel of the narrow plot, and three pixels per bar.
MAX_POINTS = 400
MAX_BARS = 110


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack.

    Args:
        label: Its name in the legend.
        steps: x values, rising.
        values: y values, one each.
        color: 1 .. 7.
        smooth: Draw the values faintly, with their running mean on top.
        is_dashed: Dash the line, to distinguish it without colour.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    color: int = 1
    smooth: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """The content of one chart.

    Args:
        title: Its heading.
        note: The meaning of the numbers.
        unit: Label of the y axis.
        series: Lines from back to front, or layers from the bottom to the top.
        references: Horizontal lines, each a value with a label to the right of the plot.
        low: Lower end of the y axis; None: the data's.
        high: Upper end of the y axis; None: the data's.
        is_log: Logarithmic y axis; values of 0 are drawn at its lower end.
        is_stacked: Bars of layers instead of lines.
        is_wide: The chart spans two columns of the page.
        x_label: Label of the x axis.
        is_log_x: Logarithmic x axis with a label at each x of the longest line; x is positive.
    """

    title: str
    note: str
    unit: str
    series: Sequence[Series]
    references: Sequence[tuple[float, str]] = field(default=())
    low: float | None = None
    high: float | None = None
    is_log: bool = False
    is_stacked: bool = False
    is_wide: bool = False
    x_label: str = "step"
    is_log_x: bool = False

    @property
    def steps_per_point(self) -> int:
        """Number of steps per point."""
        return max(math.ceil(len(line.steps) / self._max_points) for line in self.series)

    @property
    def is_flat(self) -> bool:
        """Whether no line changes; then text replaces the chart."""
        return all(len(set(line.values)) == 1 for line in self.series)

    def svg(self) -> Markup:
        """Return the chart as an SVG element."""
        series = [_downsample(line, self._max_points) for line in self.series]
        axes = _Axes.around(self, series)
        marks = _bars(axes, series) if self.is_stacked else Markup().join(_line(axes, line) for line in series)
        label = f"{self.title}: {', '.join(line.label for line in series)} over {self.x_label}s"
        begin = Markup(
            '<svg class="chart" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}" data-values="{}">'
        ).format(axes.width, HEIGHT, label, _values_json(axes, series, self.x_label))
        references = _references(axes, self.references)
        return begin + _grid(axes, self.unit, self.x_label) + marks + references + Markup("</svg>")

    @property
    def _max_points(self) -> int:
        return MAX_BARS if self.is_stacked else MAX_POINTS


@dataclass(frozen=True)
class _Axes:
    """Maps steps and values to the plot's area."""

    first_step: float
    last_step: float
    ticks: Sequence[float]
    is_log: bool
    width: float
    right: float
    step_labels: Sequence[float] = ()

    @staticmethod
    def around(chart: Chart, series: Sequence[Series]) -> _Axes:
        steps = [step for line in series for step in line.steps]
        if chart.is_stacked:
            values = [0.0, *(sum(layer) for layer in zip(*(line.values for line in series), strict=True))]
        else:
            values = [
                *(value for line in series for value in line.values),
                *(value for value, _ in chart.references),
            ]
        width = WIDE_WIDTH if chart.is_wide else WIDTH
        # A bar is as wide as the distance of two steps, so the outer bars extend half of it beyond their
        # steps.
        margin = (max(steps) - min(steps)) / (2 * max(1, len(series[0].steps) - 1)) if chart.is_stacked else 0.0
        labels = max((len(label) for _, label in chart.references), default=0)
        right = width - RIGHT - labels * (WIDE_LETTER_WIDTH if chart.is_wide else LETTER_WIDTH)
        labels_x = max((line.steps for line in series), key=len) if chart.is_log_x else ()
        first, last = min(steps) - margin, max(steps) + margin
        return _Axes(first, last, _ticks(chart, values), chart.is_log, width, right, labels_x)

    def x(self, step: float) -> float:
        first, last = self.first_step, self.last_step
        if self.step_labels:
            step, first, last = math.log(step), math.log(first), math.log(last)
        share = (step - first) / (last - first) if last > first else 0.5
        return LEFT + share * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ticks(chart: Chart, values: Sequence[float]) -> list[float]:
    if chart.is_log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        return decade_ticks(low, high if high > low else low * 10)
    low = min(values) if chart.low is None else chart.low
    high = max(values) if chart.high is None else chart.high
    # Ticks have six digits; in a smaller span all labels would be equal.
    if high - low < 2e-5 * max(abs(high), abs(low)) or high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    return nice_ticks(low, high)


def _downsample(line: Series, max_points: int) -> Series:
    """Replace ranges of steps by their means."""
    every = math.ceil(len(line.steps) / max_points)
    if every == 1:
        return line
    chunks = range(0, len(line.steps), every)
    steps = [line.steps[min(start + every, len(line.steps)) - 1] for start in chunks]
    values = [_mean(line.values[start : start + every]) for start in chunks]
    return Series(line.label, steps, values, line.color, line.smooth, line.is_dashed)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return for each value the mean of its neighbourhood of up to `reach` values on both sides."""
    return [_mean(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]


def _line(axes: _Axes, line: Series) -> Markup:
    if len(line.steps) == 1:
        dot = Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>')
        return dot.format(line.color, axes.x(line.steps[0]), axes.y(line.values[0]))
    if not line.smooth or len(line.steps) < 12:
        return _curve(axes, line, line.values)
    smooth = running_mean(line.values, max(2, len(line.values) // 24))
    return _curve(axes, line, line.values, " faint") + _curve(axes, line, smooth)


def _curve(axes: _Axes, line: Series, values: Sequence[float], more: str = "") -> Markup:
    dash = Markup(' stroke-dasharray="5 4"') if line.is_dashed else ""
    path = Markup('<path class="line{} c{}" d="{}"{}/>')
    return path.format(more, line.color, _path(axes, line.steps, values), dash)


def _path(axes: _Axes, steps: Sequence[float], values: Sequence[float]) -> str:
    points = [f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in zip(steps, values, strict=True)]
    return "M" + "L".join(points)


def _bars(axes: _Axes, series: Sequence[Series]) -> Markup:
    count = len(series[0].steps)
    width = max(1.0, (axes.right - LEFT) / count * 0.82)
    bar = Markup('<rect class="bar c{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
    parts = []
    for index, step in enumerate(series[0].steps):
        left = axes.x(step) - width / 2
        below = 0.0
        for line in series:
            top, bottom = axes.y(below + line.values[index]), axes.y(below)
            below += line.values[index]
            if bottom - top > 0.05:
                parts.append(bar.format(line.color, left, top, width, bottom - top))
    return Markup().join(parts)


def _references(axes: _Axes, references: Sequence[tuple[float, str]]) -> Markup:
    heights = [axes.y(value) for value, _ in references]
    labels = zip(spread(heights, LINE_HEIGHT, HEIGHT - BOTTOM), references, strict=True)
    lines = [_level("reference", axes, y) for y in heights]
    texts = [svg_text("reference-label", axes.right + 7, y + 4, label, "start") for y, (_, label) in labels]
    return Markup().join([*lines, *texts])


def spread(wanted: Sequence[float], gap: float, highest: float) -> list[float]:
    """Return heights that are at least `gap` apart, assigned from the top and close to the wanted heights.

    Example:
        ([10, 12, 90], 18, 100) -> [10, 28, 90]; ([95, 99], 18, 100) -> [82, 100].
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    heights, last = list(wanted), -math.inf
    for index in order:
        heights[index] = last = max(wanted[index], last + gap)
    for place, index in enumerate(reversed(order)):
        heights[index] = min(heights[index], highest - place * gap)
    return heights


def _grid(axes: _Axes, unit: str, x_label: str) -> Markup:
    parts = []
    for tick in axes.ticks:
        y = axes.y(tick)
        parts.append(_level("grid", axes, y))
        parts.append(svg_text("tick", LEFT - 7, y + 3.5, format_tick(tick), "end"))
    for step in _step_ticks(axes):
        parts.append(svg_text("tick", axes.x(step), HEIGHT - BOTTOM + 15, format_tick(step), "middle"))
    parts.append(svg_text("axis", (LEFT + axes.right) / 2, HEIGHT - 4, x_label, "middle"))
    parts.append(svg_text("axis", 4, TOP - 13, unit, "start"))
    return Markup().join(parts)


def _level(css_class: str, axes: _Axes, y: float) -> Markup:
    line = Markup('<line class="{}" x1="{:g}" x2="{:g}" y1="{:.1f}" y2="{:.1f}"/>')
    return line.format(css_class, LEFT, axes.right, y, y)


def svg_text(css_class: str, x: float, y: float, content: str, anchor: str = "start") -> Markup:
    """Return an SVG text element; the text is escaped."""
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return text.format(css_class, x, y, anchor, content)


def _step_ticks(axes: _Axes) -> list[float]:
    if axes.last_step == axes.first_step:
        return [axes.first_step]
    if axes.step_labels:
        return list(axes.step_labels)
    ticks = nice_ticks(axes.first_step, axes.last_step, 6 if axes.width == WIDTH else 12)
    return [tick for tick in ticks if axes.first_step <= tick <= axes.last_step and float(tick).is_integer()]


def _values_json(axes: _Axes, series: Sequence[Series], x_label: str) -> str:
    """Return the JSON from which the page's script shows the numbers under the pointer."""
    content = {
        "box": [LEFT, TOP, axes.right, HEIGHT - BOTTOM],
        "range": [axes.first_step, axes.last_step],
        "log": bool(axes.step_labels),
        "x": x_label,
        "series": [
            {
                "label": line.label,
                "color": line.color,
                "steps": list(line.steps),
                "values": [float(f"{value:.5g}") for value in line.values],
            }
            for line in series
        ],
    }
    return json.dumps(content, separators=(",", ":"))

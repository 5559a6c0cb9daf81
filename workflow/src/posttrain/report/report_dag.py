"""The graph of rules as an inline SVG in its natural size, from left to right, with the duration of each rule.

The longest chain is the first row; every other rule is in the column before the first rule that reads its output. A
line to the next column bends in the gap between the two. A longer line runs in a lane below all boxes, with one lane
per destination rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from posttrain.plan.rule_chain import RuleNode
from posttrain.readable import format_seconds
from posttrain.report.report_charts import svg_text

NODE_WIDTH, NODE_HEIGHT = 78.0, 72.0
GAP_X, GAP_Y, LANE_HEIGHT = 11.0, 12.0, 8.0
MARGIN = 4.0
LINE_HEIGHT = 14.0
MAX_LETTERS = 10


@dataclass(frozen=True)
class RuleState:
    """The state of a rule of the chain.

    Args:
        state: "done", "not run", or "planned".
        seconds: Its duration, measured or planned; None if unknown.
    """

    state: str
    seconds: float | None = None


def draw_chain(rules: Sequence[RuleNode], states: Mapping[str, RuleState]) -> Markup:
    """Return the chain as an SVG element.

    Args:
        rules: In the order of the data.
        states: Rule name -> its state.
    """
    inputs = _direct_inputs(rules)
    cells = _cells(inputs)
    places = {
        name: (MARGIN + column * (NODE_WIDTH + GAP_X), MARGIN + row * (NODE_HEIGHT + GAP_Y))
        for name, (column, row) in cells.items()
    }
    far = [name for name in inputs if any(cells[name][0] - cells[before][0] > 1 for before in inputs[name])]
    bottom = max(y for _, y in places.values()) + NODE_HEIGHT
    lanes = {name: bottom + LANE_HEIGHT * (index + 1) for index, name in enumerate(far)}
    width, height = max(x for x, _ in places.values()) + NODE_WIDTH + MARGIN, max([bottom, *lanes.values()]) + MARGIN
    edges = [
        _edge(places[before], places[name], lanes[name] if cells[name][0] - cells[before][0] > 1 else None)
        for name in inputs
        for before in inputs[name]
    ]
    longest = max((state.seconds or 0.0 for state in states.values()), default=0.0)
    nodes = [_node(rule, states[rule.name], places[rule.name], longest) for rule in rules]
    svg = Markup('<svg class="dag" style="width:{0:g}px" viewBox="0 0 {0:g} {1:g}" role="img" aria-label="rules">')
    return svg.format(width, height) + Markup().join([*edges, *nodes]) + Markup("</svg>")


def _direct_inputs(rules: Sequence[RuleNode]) -> dict[str, list[str]]:
    """Return rule -> the rules it waits for, without those that it also waits for indirectly."""
    named = {rule.name: [name for name in rule.after if name in {other.name for other in rules}] for rule in rules}
    before: dict[str, set[str]] = {}
    for rule in rules:
        before[rule.name] = set(named[rule.name]).union(*(before[name] for name in named[rule.name]))
    return {
        name: [candidate for candidate in inputs if not any(candidate in before[other] for other in inputs)]
        for name, inputs in named.items()
    }


def _cells(inputs: Mapping[str, list[str]]) -> dict[str, tuple[int, int]]:
    """Return each rule's column and row."""
    columns: dict[str, int] = {}
    for name in inputs:
        columns[name] = 1 + max((columns[before] for before in inputs[name]), default=-1)
    chain = [max(columns, key=lambda name: columns[name])]
    while inputs[chain[-1]]:
        chain.append(max(inputs[chain[-1]], key=lambda name: columns[name]))
    cells = {name: (columns[name], 0) for name in chain}
    for name in reversed([name for name in inputs if name not in cells]):
        readers = [cells[reader][0] for reader in inputs if name in inputs[reader]]
        column = min(readers, default=columns[name] + 1) - 1
        cells[name] = column, next(row for row in range(1, len(inputs)) if (column, row) not in cells.values())
    return cells


def _edge(start: tuple[float, float], end: tuple[float, float], lane: float | None) -> Markup:
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT / 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT / 2
    detour = "" if lane is None else f"V{lane:g}H{x2 - GAP_X / 2:g}"
    return Markup('<path class="edge" d="M{:g},{:g}h{:g}{}V{:g}H{:g}"/>').format(x1, y1, GAP_X / 2, detour, y2, x2)


def _node(rule: RuleNode, state: RuleState, place: tuple[float, float], longest: float) -> Markup:
    x, y = place
    took = format_seconds(state.seconds) if state.seconds is not None else state.state
    title = f"{rule.name}: {rule.does} ({state.state}{', ' + took if state.seconds is not None else ''})"
    begin = Markup('<g class="node {}"><title>{}</title>').format(state.state.replace(" ", "-"), title)
    box = Markup('<rect class="box" x="{:g}" y="{:g}" width="{:g}" height="{:g}" rx="7"/>')
    names = [
        svg_text("name", x + 7, y + 15 + index * LINE_HEIGHT, line) for index, line in enumerate(_lines(rule.name))
    ]
    share = (state.seconds or 0.0) / longest if longest else 0.0
    bar = Markup('<rect class="share" x="{:g}" y="{:g}" height="3" rx="1.5" width="{:.1f}"/>')
    parts = [
        box.format(x, y, NODE_WIDTH, NODE_HEIGHT),
        *names,
        svg_text("took", x + 7, y + 58, took),
        bar.format(x + 7, y + NODE_HEIGHT - 7, max(3.0, share * (NODE_WIDTH - 14))) if share else "",
    ]
    return begin + Markup().join(parts) + Markup("</g>")


def _lines(name: str) -> list[str]:
    """Cut a name at its spaces and underscores into lines of at most `MAX_LETTERS`."""
    lines = [""]
    for piece in re.findall(r"[^_ ]+[_ ]?", name):
        if lines[-1] and len(lines[-1].rstrip()) + len(piece.rstrip()) > MAX_LETTERS:
            lines.append("")
        lines[-1] += piece
    return lines

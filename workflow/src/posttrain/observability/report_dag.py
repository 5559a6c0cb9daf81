"""The chain of rules as an inline SVG, from left to right, with what each rule took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from posttrain.observability.report_format import format_seconds
from posttrain.observability.rule_chain import RuleNode

NODE_WIDTH, NODE_HEIGHT = 104.0, 58.0
GAP_X, GAP_Y = 24.0, 16.0
MARGIN = 4.0


@dataclass(frozen=True)
class RuleState:
    """What is known about a rule of the chain.

    Args:
        state: "done", "not run", or "planned".
        seconds: What it took (or should take); None when unknown.
    """

    state: str
    seconds: float | None = None


def draw_chain(rules: Sequence[RuleNode], states: Mapping[str, RuleState]) -> Markup:
    """Return the chain as an SVG element.

    Args:
        rules: In the order of the data.
        states: Rule name -> what is known.
    """
    inputs = _direct_inputs(rules)
    columns = _columns(rules, inputs)
    rows = _rows(columns, inputs)
    places = {
        name: (MARGIN + columns[name] * (NODE_WIDTH + GAP_X), MARGIN + rows[name] * (NODE_HEIGHT + GAP_Y))
        for name in inputs
    }
    width = 2 * MARGIN + (max(columns.values()) + 1) * (NODE_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + (max(rows.values()) + 1) * (NODE_HEIGHT + GAP_Y) - GAP_Y
    longest = max((state.seconds or 0.0 for state in states.values()), default=0.0)
    edges = "".join(_edge(places[before], places[name]) for name in inputs for before in inputs[name])
    nodes = "".join(_node(rule, states[rule.name], places[rule.name], longest) for rule in rules)
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="rules of the workflow"'
    return Markup(f'<svg class="dag" {box}>{edges}{nodes}</svg>')


def _direct_inputs(rules: Sequence[RuleNode]) -> dict[str, list[str]]:
    """Return rule -> the rules it waits for, without those that another of them waits for already."""
    named = {rule.name: [name for name in rule.after if name in {other.name for other in rules}] for rule in rules}
    before: dict[str, set[str]] = {}
    for rule in rules:
        before[rule.name] = set(named[rule.name]).union(*(before[name] for name in named[rule.name]))
    return {
        name: [candidate for candidate in inputs if not any(candidate in before[other] for other in inputs)]
        for name, inputs in named.items()
    }


def _columns(rules: Sequence[RuleNode], inputs: Mapping[str, list[str]]) -> dict[str, int]:
    """Return each rule's column: after all its inputs; a source stands just before its first reader."""
    columns: dict[str, int] = {}
    for rule in rules:
        columns[rule.name] = 1 + max((columns[name] for name in inputs[rule.name]), default=-1)
    for name in inputs:
        if not inputs[name]:
            columns[name] = max(0, min(_reader_columns(name, columns, inputs), default=1) - 1)
    return columns


def _rows(columns: Mapping[str, int], inputs: Mapping[str, list[str]]) -> dict[str, int]:
    """Return each rule's row, so that no line runs through another rule's box.

    A line runs level from its rule to the column before its reader. The longest chain gets the first row; the
    others get the first row in which their box and line are free, short lines first.
    """
    spine = _longest_chain(columns, inputs)
    rows = dict.fromkeys(spine, 0)
    taken = {(0, columns[name]) for name in spine}
    reach = {name: max(_reader_columns(name, columns, inputs), default=columns[name] + 1) for name in inputs}
    for name in sorted((name for name in inputs if name not in rows), key=lambda name: reach[name] - columns[name]):
        cells = range(columns[name], reach[name])
        rows[name] = next(row for row in range(len(inputs)) if all((row, column) not in taken for column in cells))
        taken |= {(rows[name], column) for column in cells}
    return rows


def _longest_chain(columns: Mapping[str, int], inputs: Mapping[str, list[str]]) -> list[str]:
    chain = [max(columns, key=lambda name: columns[name])]
    while inputs[chain[-1]]:
        chain.append(max(inputs[chain[-1]], key=lambda name: columns[name]))
    return chain


def _reader_columns(name: str, columns: Mapping[str, int], inputs: Mapping[str, list[str]]) -> list[int]:
    return [columns[reader] for reader in inputs if name in inputs[reader]]


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT / 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT / 2
    # Level with the start up to the gap before the target; the bend lies in the gap.
    middle = x2 - GAP_X / 2
    bend = f"C{middle:g},{y1:g} {middle:g},{y2:g} {x2:g},{y2:g}"
    return f'<path class="edge" d="M{x1:g},{y1:g}H{x2 - GAP_X:g}{bend}"/>'


def _node(rule: RuleNode, state: RuleState, place: tuple[float, float], longest: float) -> str:
    x, y = place
    first, second = _split_name(rule.name)
    jobs = f" ×{rule.num_jobs}" if rule.num_jobs > 1 else ""
    took = format_seconds(state.seconds) if state.seconds is not None else state.state
    share = (state.seconds or 0.0) / longest if longest else 0.0
    title = escape(f"{rule.name}: {rule.does} ({state.state}{', ' + took if state.seconds is not None else ''})")
    bar = (
        f'<rect class="share" x="{x + 8:g}" y="{y + NODE_HEIGHT - 7:g}" height="3" rx="1.5" '
        f'width="{max(3.0, share * (NODE_WIDTH - 16)):.1f}"/>'
        if share
        else ""
    )
    return (
        f'<g class="node {state.state.replace(" ", "-")}"><title>{title}</title>'
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{NODE_WIDTH:g}" height="{NODE_HEIGHT:g}" rx="7"/>'
        f'<text class="name" x="{x + 8:g}" y="{y + 17:g}">{escape(first)}</text>'
        f'<text class="name" x="{x + 8:g}" y="{y + 30:g}">{escape(second)}</text>'
        f'<text class="took" x="{x + 8:g}" y="{y + 45:g}">{escape(took + jobs)}</text>{bar}</g>'
    )


def _split_name(name: str) -> tuple[str, str]:
    """Cut a name in two at the space or underscore that leaves the shorter longest half."""
    cuts = [index + 1 for index, letter in enumerate(name) if letter in "_ "]
    cut = min(cuts, key=lambda index: max(index, len(name) - index), default=len(name))
    return name[:cut].rstrip(), name[cut:]

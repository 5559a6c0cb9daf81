"""Evaluates expressions of a Python launcher from its constants; calls and imports nothing of it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from posttrain_import.script import MOST_CHARACTERS, MOST_WORDS

RUNS = "it is computed when the launcher runs"
# Larger numbers do not occur as sizes in training.
_LARGEST = 2**63
_COMPUTES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_COMPARES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "int": int, "len": len, "float": float}


@dataclass(frozen=True)
class Piece:
    """Characters of a text, their lines, and the reason if they are unknown."""

    text: str
    line: int
    last: int
    why: str = ""


@dataclass(frozen=True)
class Text:
    """A text in pieces, so that each of its words has a line number."""

    pieces: tuple[Piece, ...] = ()

    @property
    def plain(self) -> str | None:
        """The characters, or None if some are unknown."""
        return None if any(piece.why for piece in self.pieces) else "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Unknown:
    """A value that the script does not define, with the reason."""

    why: str


def text_of(pieces: Iterable[Piece]) -> Text | Unknown:
    """Return a text, or Unknown if it is too long for flags."""
    found = tuple(pieces)
    is_long = len(found) > MOST_WORDS or sum(len(piece.text) for piece in found) > MOST_CHARACTERS
    return Unknown("it is too long") if is_long else Text(found)


def computed(kind: type, left: Any, right: Any) -> Any:
    """Return the result of an operator on two plain values, or Unknown if it has none or is too large."""
    compute = _COMPUTES.get(kind)
    try:
        if compute is None or isinstance(left, str) or isinstance(right, str):
            return Unknown(RUNS)
        if isinstance(left, list) and kind is ast.Mult and len(left) * int(right) > MOST_WORDS:
            return Unknown("it is too long")
        if kind in (ast.Pow, ast.LShift) and (abs(left) > 2**16 or not 0 <= right <= 62):
            return Unknown("it is too large")
        found = compute(left, right)
        is_large = len(found) > MOST_WORDS if isinstance(found, list) else abs(found) > _LARGEST
    except (TypeError, ValueError, ArithmeticError):
        return Unknown(RUNS)
    return Unknown("it is too large") if is_large else found


def compared(kind: type, left: Any, right: Any) -> Any:
    """Return the result of a comparison of two plain values, or Unknown."""
    try:
        return bool(_COMPARES[kind](left, right))
    except (TypeError, KeyError):
        return Unknown("it is compared when the launcher runs")


def called(name: str, values: list[Any]) -> Any:
    """Return the result of one of a few Python functions on plain values, or Unknown."""
    try:
        return _CALLS[name](*values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return Unknown(f"{name}() is computed when the launcher runs")


def literal(text: str) -> Any:
    """Return a number, or a list such as "[0]*3+[1]*75"; None for any other text."""
    try:
        found = folded(ast.parse(text.strip()[:MOST_CHARACTERS], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    items = found if isinstance(found, list) else [found]
    return found if all(isinstance(item, (int, float)) for item in items) else None


def whole_number(text: str) -> int | None:
    """Return the value of an integer expression, or None for any other text."""
    found = literal(text)
    return found if isinstance(found, int) else None


def constant(value: Any) -> Any:
    """Return a text's characters, and any other value unchanged."""
    if isinstance(value, Text):
        return Unknown(RUNS) if value.plain is None else value.plain
    return value


def folded(node: ast.expr, value: Callable[[ast.expr], Any] | None = None) -> Any:
    """Return the value of an expression of plain values, or Unknown.

    Args:
        node: A number, a list, or operators between values.
        value: Evaluates the operands; None: `folded` itself.
    """
    value = value or folded
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [value(item) for item in node.elts]
        # A few characters of nested lists can produce billions of items.
        return Unknown("it is a list of lists") if any(isinstance(item, list) for item in items) else items
    if isinstance(node, ast.BoolOp):
        is_or = isinstance(node.op, ast.Or)
        values = [value(part) for part in node.values]
        # As in Python, the first operand that decides; an unknown one makes the result unknown.
        return next((v for v in values if isinstance(constant(v), Unknown) or bool(constant(v)) is is_or), values[-1])
    if isinstance(node, ast.IfExp):
        test = constant(value(node.test))
        return test if isinstance(test, Unknown) else value(node.body if test else node.orelse)
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    found = [constant(value(part)) for part in parts] or [Unknown(RUNS)]
    if unknown := next((item for item in found if isinstance(item, Unknown)), None):
        return unknown
    if isinstance(node, ast.UnaryOp):
        return not found[0] if isinstance(node.op, ast.Not) else computed(ast.Mult, -1, found[0])
    return compared(type(node.ops[0]), *found) if isinstance(node, ast.Compare) else computed(type(node.op), *found)  # type: ignore[attr-defined]

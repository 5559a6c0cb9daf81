"""Expressions of a launcher in Python, computed from its constants alone: nothing of it is called or imported."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from posttrain.foreign.script import MOST_CHARACTERS, MOST_WORDS

# Larger numbers are no sizes of a training.
_LARGEST = 2**63
_COMPUTES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
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
    """Characters of a text, the lines that they stand in, and why they are not known."""

    text: str
    line: int
    last: int
    why: str = ""


@dataclass(frozen=True)
class Text:
    """A text in pieces, so that each of its words has a line."""

    pieces: tuple[Piece, ...] = ()

    @property
    def plain(self) -> str | None:
        """The characters, None where some are not known."""
        return None if any(piece.why for piece in self.pieces) else "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Unknown:
    """A value that the script does not tell."""

    why: str


def text_of(pieces: Iterable[Piece]) -> Text | Unknown:
    """Return a text, unless it is longer than flags are."""
    found = tuple(pieces)
    is_long = len(found) > MOST_WORDS or sum(len(piece.text) for piece in found) > MOST_CHARACTERS
    return Unknown("it is too long") if is_long else Text(found)


def computed(kind: type, left: Any, right: Any) -> Any:
    """Return the result of an operator between two plain values, or Unknown where it is none, or too large."""
    compute = _COMPUTES.get(kind)
    try:
        if compute is None or isinstance(left, str) or isinstance(right, str):
            return Unknown("it is computed when the launcher runs")
        if isinstance(left, list) and kind is ast.Mult and len(left) * int(right) > MOST_WORDS:
            return Unknown("it is too long")
        if kind is ast.Pow and (abs(left) > 2**16 or not 0 <= right <= 62):
            return Unknown("it is too large")
        found = compute(left, right)
        is_large = len(found) > MOST_WORDS if isinstance(found, list) else abs(found) > _LARGEST
    except (TypeError, ValueError, ArithmeticError):
        return Unknown("it is computed when the launcher runs")
    return Unknown("it is too large") if is_large else found


def compared(kind: type, left: Any, right: Any) -> Any:
    """Return whether two plain values compare so, or Unknown."""
    try:
        return bool(_COMPARES[kind](left, right))
    except (TypeError, KeyError):
        return Unknown("it is compared when the launcher runs")


def called(name: str, values: list[Any]) -> Any:
    """Return what one of a few functions of Python makes of plain values, or Unknown."""
    try:
        return _CALLS[name](*values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return Unknown(f"{name}() is computed when the launcher runs")


def literal(text: str) -> Any:
    """Return a number, or a list such as "[0]*3+[1]*75"; None where a text is neither."""
    try:
        return _folded(ast.parse(text.strip()[:MOST_CHARACTERS], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def whole_number(text: str) -> int | None:
    """Return what an arithmetic expression of whole numbers is, None where a text is none."""
    found = literal(text)
    return found if isinstance(found, int) else None


def _folded(node: ast.expr) -> Any:
    """Return the value of an expression of numbers and lists.

    Raises:
        ValueError: It holds something else.
    """
    found: Any = Unknown("")
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.List):
        items = [_folded(item) for item in node.elts]
        if any(isinstance(item, list) for item in items):
            # Lists of lists are no setting, and a few characters make billions of items of them.
            raise ValueError("a list of lists")
        return items
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_folded(node.operand)
    if isinstance(node, ast.BinOp):
        found = computed(type(node.op), _folded(node.left), _folded(node.right))
    if isinstance(found, Unknown):
        raise ValueError("not a number")
    return found

"""Arithmetic of bash: whole numbers of 64 bits, variables, assignments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*(?:\[[^\[\]]*\])?"
    r"|\*\*|<<=|>>=|\+\+|--|&&|\|\||[-+*/%&^|<>=!]=|<<|>>|[-+*/%<>=!~&|^?:,()])"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_COMPUTES: dict[str, Callable[[int, int], int]] = {
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "+": operator.add, "-": operator.sub, "*": operator.mul,
    "<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63), "**": lambda a, b: pow(a, b, 2**64),
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}  # fmt: skip
_MOST_TOKENS = 500


class NotComputed(ValueError):
    """An expression that is not known, or that bash rejects."""


class Arithmetic:
    """One expression.

    Args:
        text: Of it, with expansions done.
        read: Returns the text of a variable, or of an array's element.
        write: Sets one.
    """

    def __init__(self, text: str, read: Callable[[str], str], write: Callable[[str, int], None]):
        self._tokens: list[str] = []
        self._at, self._read, self._write, self._skips = 0, read, write, 0
        place = 0
        text = text.rstrip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None or len(self._tokens) > _MOST_TOKENS:
                raise NotComputed(text[place:])
            self._tokens.append(match[1])
            place = match.end()

    def value(self) -> int:
        """Return the number.

        Raises:
            NotComputed: It is not known.
        """
        if not self._tokens:
            return 0
        try:
            found = self._comma()
        except (ZeroDivisionError, RecursionError, ValueError) as error:
            raise NotComputed(str(error)) from error
        if self._at < len(self._tokens):
            raise NotComputed(self._tokens[self._at])
        return found

    def _next(self, *tokens: str) -> str:
        if self._at < len(self._tokens) and self._tokens[self._at] in tokens:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""

    def _comma(self) -> int:
        found = self._assignment()
        while self._next(","):
            found = self._assignment()
        return found

    def _assignment(self) -> int:
        name, sign = (*self._tokens[self._at : self._at + 2], "", "")[:2]
        if not _is_name(name) or not re.fullmatch(r"(<<|>>|[-+*/%&^|])?=", sign):
            return self._ternary()
        self._at += 2
        value = self._assignment()
        if not self._skips:
            value = value if sign == "=" else _compute(sign[:-1], self._variable(name), value)
            self._write(name, value)
        return value

    def _ternary(self) -> int:
        found = self._binary(0)
        if not self._next("?"):
            return found
        first = self._skipped(self._comma, not found)
        if not self._next(":"):
            raise NotComputed("?")
        second = self._skipped(self._ternary, bool(found))
        return first if found else second

    def _skipped(self, part: Callable[[], int], is_skipped: bool) -> int:
        """Return a part that sets and reads nothing if another one decides."""
        self._skips += is_skipped
        found = part()
        self._skips -= is_skipped
        return found

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        found = self._binary(level + 1)
        while sign := self._next(*_LEVELS[level]):
            if sign in ("&&", "||"):
                is_decided = bool(found) is (sign == "||")
                right = self._skipped(lambda: self._binary(level + 1), is_decided)
                found = int(bool(found) if is_decided else bool(right))
            else:
                # Powers alone are read from the right.
                right = self._binary(level if sign == "**" else level + 1)
                found = 0 if self._skips else _compute(sign, found, right)
        return found

    def _unary(self) -> int:
        if sign := self._next("++", "--"):
            name = self._name()
            return self._step(name, 1 if sign == "++" else -1)
        if sign := self._next("+", "-", "!", "~"):
            value = self._unary()
            return {"+": value, "-": _wrapped(-value), "!": int(not value), "~": ~value}[sign]
        if self._next("("):
            found = self._comma()
            if not self._next(")"):
                raise NotComputed("(")
            return found
        if self._at >= len(self._tokens):
            raise NotComputed("it ends early")
        token = self._tokens[self._at]
        self._at += 1
        if token[0].isdigit():
            return _number(token)
        if not _is_name(token):
            raise NotComputed(token)
        if sign := self._next("++", "--"):
            step = 1 if sign == "++" else -1
            return self._step(token, step) - step
        return 0 if self._skips else self._variable(token)

    def _name(self) -> str:
        self._at += 1
        name = self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""
        if not _is_name(name):
            raise NotComputed(name)
        return name

    def _step(self, name: str, step: int) -> int:
        value = 0 if self._skips else _wrapped(self._variable(name) + step)
        if not self._skips:
            self._write(name, value)
        return value

    def _variable(self, name: str) -> int:
        # A variable may hold an expression itself; what launch scripts hold is numbers.
        text = self._read(name).strip()
        match = re.fullmatch(r"([-+]?)(0[xX][0-9a-fA-F]+|\d+)?", text)
        if match is None:
            raise NotComputed(text)
        return (-1 if match[1] == "-" else 1) * _number(match[2] or "0")


def _is_name(token: str) -> bool:
    return bool(token) and (token[0].isalpha() or token[0] == "_")


def _number(token: str) -> int:
    base, mark, digits = token.partition("#")
    if mark and 2 <= int(base) <= 36:
        return _wrapped(int(digits, int(base)))
    if re.fullmatch(r"0\d+", token):
        return _wrapped(int(token, 8))
    return _wrapped(int(token, 16) if token[:2].lower() == "0x" else int(token))


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _compute(sign: str, left: int, right: int) -> int:
    if sign == "**" and right < 0:
        raise NotComputed("a negative power")
    return _wrapped(int(_COMPUTES[sign](left, right)))

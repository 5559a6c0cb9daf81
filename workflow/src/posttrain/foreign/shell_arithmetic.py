"""Whole numbers that bash and Python compute alike; everything else is not computed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from posttrain.foreign.expression import compared, computed

_NAME = re.compile(r"(?<![\w#])[A-Za-z_]\w*")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})")
_WRITTEN = re.compile(r"[\d\s()+*/%<>=!&|?:-]*")
# Operators that Python has with another meaning, or not at all.
_OTHER = re.compile(r"//|\+\+|--|<>|!(?!=)|=!|(?<![<>=!])=(?!=)")


def number(text: str, value: Callable[[str], str | None]) -> int | None:
    """Return what bash makes of an expression; None where it is not known.

    Args:
        text: With its expansions done.
        value: Returns the text of a variable.
    """
    found = {name: value(name) for name in _NAME.findall(text)}
    if any(one is None or not _NUMBER.fullmatch(one) for one in found.values()) or _OTHER.search(text):
        return None
    text = _NAME.sub(lambda match: f"({found[match[0]]})", text)
    text = re.sub(r"\b0[xX][0-9a-fA-F]+\b", lambda match: str(int(match[0], 16)), text)
    if not _WRITTEN.fullmatch(text):
        return None
    if "**" in text and "-" in text:
        # The sign of a power's base is Python's last step and bash's first.
        return None
    choice = re.fullmatch(r"([^?:]+)\?([^?:]+):([^?:]+)", text)
    if choice and all(part.count("(") == part.count(")") for part in choice.groups()):
        text = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    text = text.replace("/", "//").replace("&&", " and ").replace("||", " or ")
    try:
        return _value(ast.parse(" ".join(text.split()) or "0", mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    """Return the value of a part.

    Raises:
        ValueError: Python's answer need not be bash's.
    """
    match node:
        case ast.Constant(value=int(found)):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            found = -_value(inner)
        case ast.BoolOp(op=kind, values=values):
            found = int((all if isinstance(kind, ast.And) else any)([_value(value) for value in values]))
        case ast.Compare(left=one, ops=[kind], comparators=[two]):
            found = int(compared(type(kind), _value(one), _value(two)))
        case ast.IfExp(test=test, body=one, orelse=two):
            found = _value(one if _value(test) else two)
        case ast.BinOp(left=one, op=ast.LShift(), right=two):
            found = _value(one) * 2 ** min(_value(two), 63)
        case ast.BinOp(left=one, op=kind, right=two):
            left, right = _value(one), _value(two)
            # Bash rounds towards zero, Python down.
            if isinstance(kind, (ast.FloorDiv, ast.Mod)) and (left < 0 or right <= 0):
                raise ValueError("rounded otherwise")
            found = computed(type(kind), left, right)
        case _:
            raise ValueError("not followed")
    if not isinstance(found, int) or abs(found) >= 2**63:
        raise ValueError("not a number of bash")
    return found

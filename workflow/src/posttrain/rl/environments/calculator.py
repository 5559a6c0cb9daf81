"""The environment `calculator`: arithmetic questions, and a function that computes exactly."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from posttrain.rl.environments.protocol import Message

NAME = "calculator"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Numbers, + - * / and parentheses, such as 3*(4+5)"}
            },
            "required": ["expression"],
        },
    },
}
MAX_CHARACTERS = 200
_ALLOWED = re.compile(r"[0-9.()+\-*/ ]+", re.ASCII)
_OPERATORS: Mapping[type[ast.AST], Callable[..., Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
_NUMBER = re.compile(r"[+-]?\d{1,100}(?:\.\d{1,100}|/0*[1-9]\d{0,99})?", re.ASCII)


class Calculator:
    """The agent may call `calculator` and ends the episode with a response without a call: the number alone.

    Args:
        seed: Not used; nothing is random.
    """

    def __init__(self, seed: int):
        self._label = Fraction()
        self._answer = ""

    async def reset(self, row: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
        """Ask the row's prompt.

        Raises:
            ValueError: The label is not a number.
        """
        label = _number_of(str(row["label"]))
        if label is None:
            raise ValueError(f"the label {row['label']!r:.80} is not a number")
        self._label = label
        return [dict(message) for message in row["messages"]], [TOOL]

    async def step(self, action: Message) -> tuple[list[Message], bool]:
        """Answer calls with results or errors; without a call, the episode has ended."""
        calls = action.get("tool_calls") or []
        if not calls:
            self._answer = action["content"]
            return [], True
        return [_answer(call) for call in calls], False

    async def reward(self, trajectory: Mapping[str, Any]) -> float:
        """Return 1 if the final answer is the label's number, otherwise 0."""
        return float(_number_of(self._answer.strip()) == self._label)

    def perfect(self, row: Mapping[str, Any]) -> list[str]:
        """Return the answer of an agent that needs no calculator."""
        return [str(row["label"])]


def calculate(expression: str) -> str:
    """Return the exact value of an expression: a whole number, or a fraction such as 7/3.

    Args:
        expression: Numbers, + - * / and parentheses.

    Raises:
        ValueError: It is something else, is too long, or divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        if not _ALLOWED.fullmatch(expression):
            raise SyntaxError
        # Not `rl.reward.expression`: LaTeX's grammar takes seconds for nested parentheses.
        return str(_value(ast.parse(expression.strip(), mode="eval").body, expression.strip()))
    except SyntaxError:
        raise ValueError("an expression has numbers, + - * / and parentheses only") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, text: str) -> Fraction:
    """Return the value of a part of an expression."""
    if isinstance(node, ast.Constant):
        return Fraction(text[node.col_offset : node.end_col_offset])  # Python's own number is rounded
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))
    raise SyntaxError


def _answer(call: Mapping[str, Any]) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": _result(call["function"])}


def _result(function: Mapping[str, Any]) -> str:
    """Return what the agent reads after a call."""
    arguments = function["arguments"]
    if function["name"] != NAME:
        return f"error: there is no function {function['name']!r:.80}; call {NAME}"
    if not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        return "error: give the argument expression, a text"
    try:
        return calculate(arguments["expression"])
    except ValueError as error:
        return f"error: {error}"


def _number_of(text: str) -> Fraction | None:
    return Fraction(text) if _NUMBER.fullmatch(text) else None

"""Reads the tests of a row, in the shapes of APPS, TACO, DeepCoder, LiveCodeBench, MBPP and HumanEval.

| label | tests |
|---|---|
| `{"inputs": [...], "outputs": [...]}` | standard input and output of each run |
| the same with `"fn_name"` | arguments and result of a function, or of a method of `class Solution` |
| a list of `{"input", "output", "testtype"}` | `stdin`, or `functional` with JSON arguments, one in a line |
| text that is no JSON | asserts (`posttrain.rl.reward.assert_tests`) |

A label may also be JSON text of the first three.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.assert_tests import AssertTests, split_asserts

# Columns in which rows name the function, from the row itself and from its `metadata`.
_FUNCTION_KEYS = ("fn_name", "func_name", "entry_point")


@dataclass(frozen=True)
class StdinTest:
    """A run of the program.

    Args:
        stdin: Its input.
        expected: Its output.
    """

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A call of a function.

    Args:
        function: Its name.
        arguments: Its arguments, JSON types.
        expected: Results that are right, JSON types.
    """

    function: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]


Tests = list[StdinTest] | list[CallTest] | AssertTests


def read_tests(answer: Answer) -> Tests:
    """Return the tests of a response's row.

    Raises:
        ValueError: The label has none of the shapes.
    """
    label = answer.label
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            return split_asserts(label, _function_of(answer.columns))
    try:
        tests = _pairs(label, answer) if isinstance(label, dict) else _list(label, answer)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the label has not the shape of tests: {type(error).__name__}: {error}") from error
    if not tests:
        raise ValueError("the label has no test")
    return tests


def _pairs(label: Mapping[str, Any], answer: Answer) -> list[StdinTest] | list[CallTest]:
    inputs, outputs = label["inputs"], label["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    rows = list(zip(inputs, outputs, strict=True))
    if not (name := _function_of(label)):
        return [StdinTest(_text(given), _text(wanted)) for given, wanted in rows]
    return [CallTest(name, _arguments(given), _results(_read(wanted))) for given, wanted in rows]


def _results(wanted: Any) -> tuple[Any, ...]:
    """Return the result, and where it is a list of one, also its item: APPS wraps some results so."""
    return (wanted, wanted[0]) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)


def _list(label: Sequence[Mapping[str, Any]], answer: Answer) -> list[StdinTest] | list[CallTest]:
    kinds = {str(row.get("testtype", "stdin")) for row in label}
    if kinds <= {"stdin", "stdin_stdout"}:
        return [StdinTest(_text(row["input"]), _text(row["output"])) for row in label]
    if kinds != {"functional"}:
        raise ValueError(f"testtype is {', '.join(sorted(kinds))}: expected stdin or functional, the same in all tests")
    return [_functional(row, answer) for row in label]


def _functional(row: Mapping[str, Any], answer: Answer) -> CallTest:
    name = _function_of(row) or _function_of(answer.columns)
    if not name:
        raise ValueError("the function is not named: give metadata.func_name, or a column fn_name")
    given = row["input"]
    return CallTest(name, _lines(given), (_read(row["output"]),))


def _arguments(given: Any) -> tuple[Any, ...]:
    """Return the arguments of a call: a list, or JSON text of one or of an argument in each line."""
    read = _read(given)
    if isinstance(read, str):
        return _lines(given)
    if not isinstance(read, list):
        raise ValueError(f"the arguments of a call are {type(read).__name__}: expected a list")
    return tuple(read)


def _lines(given: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, one in a line or in an item of a list."""
    lines = [line for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if not isinstance(lines, list):
        raise ValueError(f"the arguments of a call are {type(lines).__name__}: expected a list")
    return tuple(map(_read, lines))


def _function_of(row: Mapping[str, Any]) -> str:
    """Return the name of the function that a row names; "" if it names none."""
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    names = [place[key] for place in (row, metadata) for key in _FUNCTION_KEYS if place.get(key)]
    return str(names[0]) if names else ""


def _text(value: Any) -> str:
    """Return an input or output, which may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(value: Any) -> Any:
    """Return a value that may be JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value

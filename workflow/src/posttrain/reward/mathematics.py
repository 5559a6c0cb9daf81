"""Graders of mathematics: each name is a convention of where the answer stands; what counts as equal is one for all.

The conventions and the rules of equality are described in docs/rewards.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from posttrain.reward.answer import Answer
from posttrain.reward.equality import are_equal
from posttrain.reward.notation import MAX_LENGTH

# As verl's math_dapo.py reads a response: its last 300 characters.
DAPO_TAIL = 300
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOXED = "\\boxed{"
_STATED = re.compile(r"answer\**\s*(?:is|:)[\s:*]*", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.,/^])[-+\u2212]?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
    r"(?: ?/ ?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)?(?!\w)",
    re.ASCII,
)
# The final answer of a response stands at its end.
_TAIL = 10_000


def math_boxed(answer: Answer) -> float:
    """Grade strictly: the answer is the content of the last complete \\boxed{...}, and nothing else."""
    return _score(answer, last_boxed)


def math_answer(answer: Answer) -> float:
    """Grade leniently: the last complete box, else what follows "####", else "the answer is", else the last number."""
    return _score(answer, _lenient)


def math_dapo(answer: Answer) -> float:
    """Grade as DAPO: the last line "Answer: ..." within the last 300 characters."""
    return _score(answer, _dapo)


def math_deepscaler(answer: Answer) -> float:
    """Grade as DeepScaleR: the last complete box after </think>."""
    return _score(answer, _after_thinking)


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...}, the inner one of two; None where there is none.

    Args:
        text: Of any length and any form; the time is linear.
    """
    starts: list[tuple[int, int]] = []
    depth, place = 0, 0
    found = (-1, -1)
    while (place := _next_brace(text, place)) >= 0:
        if text[place] == "{":
            if text.endswith(_BOXED, 0, place + 1):
                starts.append((depth, place + 1))
            depth += 1
        else:
            depth -= 1
            if starts and starts[-1][0] == depth:
                found = max(found, (starts.pop()[1], place))
            elif depth < 0:
                depth, starts = 0, []
        place += 1
    return text[found[0] : found[1]] if found[0] >= 0 else None


def _next_brace(text: str, place: int) -> int:
    found = _BRACE.search(text, place)
    return found.start() if found else -1


# An escaped brace is a sign of a set, and belongs to the text.
_BRACE = re.compile(r"(?<!\\)[{}]")


def _lenient(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None or _BOXED in text:
        return boxed
    if "####" in text:
        return text[text.rindex("####") + 4 :].lstrip().partition("\n")[0]
    tail = text[-_TAIL:]
    if stated := list(_STATED.finditer(tail)):
        return _stated(tail[stated[-1].end() :].partition("\n")[0])
    numbers = _NUMBER.findall(tail)
    return numbers[-1] if numbers else None


def _stated(line: str) -> str:
    """Return the answer of "the answer is ...": its first number where a sentence goes on, or else all of the line."""
    line = line.strip().strip("*").strip()
    number = _NUMBER.match(line.removeprefix("$"))
    return number[0] if number and re.match(r"[.,;]?\s*(?:$|[,.;]\s*[A-Za-z])", line[number.end() :]) else line


def _dapo(text: str) -> str | None:
    found = _DAPO_ANSWER.findall(text[-DAPO_TAIL:])
    if not found:
        return None
    boxed = last_boxed(found[-1])
    return boxed if boxed is not None else found[-1]


def _after_thinking(text: str) -> str | None:
    _, end, said = text.rpartition("</think>")
    return last_boxed(said) if end else None


def _score(answer: Answer, find: Callable[[str], str | None]) -> float:
    if answer.is_truncated:
        return 0.0
    found = find(answer.text)
    if found is None or not found.strip():
        return 0.0
    return float(any(are_equal(found, label) for label in labels_of(answer.label)))


def labels_of(label: Any) -> list[str]:
    """Return the admissible answers of a label.

    Args:
        label: Text (plain, LaTeX, \\boxed{...}, or a solution that ends in "#### 72" or has a box), a number, or a
            list of these, any of which is right.

    Raises:
        ValueError: For null, an object, or a number that is none.
    """
    if isinstance(label, (list, tuple)):
        return [answer for one in label for answer in labels_of(one)]
    if isinstance(label, bool):
        return [str(label)]
    if isinstance(label, int):
        return [str(label)]
    if isinstance(label, float) and math.isfinite(label):
        return [format(Decimal(repr(label)), "f")]
    if not isinstance(label, str):
        raise ValueError(f"no label for mathematics: {label!r}; allowed are text, numbers and lists of them")
    boxed = last_boxed(label)
    if boxed is not None:
        return [boxed]
    return [label.rpartition("####")[2].strip()[: MAX_LENGTH + 1]]

"""Graders of mathematics: each name is a convention of where the answer stands; what counts as equal is one for all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.equality import are_equal

# As verl's math_dapo.py reads a response: its last 300 characters.
DAPO_TAIL = 300
# The final answer of a response stands at its end.
_TAIL = 10_000
# Emphasis and code of markdown around something: **42**, __42__, `42`. In 2*3*4 and a_1 nothing is emphasized.
_MARKUP = re.compile(r"(?<![\w*)}\]\\])(\*{1,3}|_{1,3}|`{1,3})(?=[^\s*_`])([^\n]{0,300}?[^\s*_`])\1(?![\w*({\[])")
# Tags of HTML, and what is struck out.
_TAG = re.compile(r"</?(?:b|i|em|strong|u|code|answer|p|br)\s*/?>|~~[^~\n]{1,80}~~")
_COUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_VERB = (
    r"(?:\b(?:is|are|was|equals|becomes|(?:should|must|would|will|can only|has to) be|"
    r"(?:comes|works|turns) out (?:to be|to|as|at)|comes to)|[:=\u2192]|[-\u2013\u2014](?= ))"
)
# Statements of an answer: "42 is the answer" (group 1 has it), "the answer is 42", a heading, and GSM8K's "#### 72",
# which a heading of words such as "#### Step 1" is not.
_STATED = re.compile(
    r"(?:^|[.!?:,;]\s|\b(?:so|thus|hence|therefore|that))\s*([^\n.!?:;]{1,80}?) (?:is|must be) (?:the|our|my) "
    r"(?:final |correct |right )?answer\b"
    r"|\banswers?\b(?:\s+(?:to|of|for)\b[^\n.:,=]{0,80}?|\s*,[^\n.:,=]{0,40},|\s+(?:we|I|you)\b[^\n.:,=]{0,40}?)?"
    rf"\s*{_VERB}(?!\w|n't)[ :]*"
    r"|^[# ]*(?:the |my |our )?(?:final |correct )?answer[ .:]*$"
    r"|(?<!#)####(?!#)(?![^\n]*\banswer)(?:(?! *(?:[A-Za-z]{2}|\n))|(?=[^\n]*\s*\Z))",
    re.IGNORECASE | re.MULTILINE,
)
# The first line, or that of a display, behind what only introduces an answer.
_LINE = re.compile(
    r"(?:(?:\$\$?|\\\[)\s*\n)?\s*"
    r"(?:(?:then|thus|therefore|hence|so|clearly|simply|just|exactly|precisely|indeed|obviously|now|actually|finally|"
    r"in fact|of course|only|also|always|definitely|certainly|surely|=>|equal to|given by|found to be|as follows|"
    r"approximately|about|roughly|around|the (?:number|value|integer|fraction|set|interval|point)|:|,)[\s:,]+)*(.*)",
    re.IGNORECASE,
)
# Where a sentence goes on behind its answer.
_REST = re.compile(
    r"[.!?](?=[\s\"'\u201d)]|$)"
    r"|,? +(?:because|since|as|which|where|so|hence|therefore|thus|but|though|although|meaning|given|due|i\.e|who|and"
    r" (?:that|this|so|it|we|the|not|they|there|then|hence|thus|therefore|is|I|nothing)|if (?:I|we))\b"
    r"| +[:;]-?[)D]|[\u2600-\U0001faff]"
    r"|[,;] +(?!(?:and|or)\b|\\)(?:[A-Za-z]{2,}|I\b)|;? +[-\u2013\u2014]+ +(?=[A-Za-z]{2})| +\((?=[A-Za-z]{2,}[ )-])"
    r"|(?<=[\d$}%)]) +(?:for|in|of|on|at|from|by|when|after|among|under|altogether|total|left|remaining|long|wide)\b"
    r"(?: +[A-Za-z][^\d\\$]*)?$"
)
_NUMBER = re.compile(
    rf"(?<![\w.,/^])[-+\u2212]?\$?(?:{_COUNT}|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\d))?(?: ?/ ?{_COUNT})?(?!\w)", re.ASCII
)
_NEGATED = re.compile(
    r"(?:\bnot|n't|\bnever|\bcannot)(?: \w+){0,3} *$"
    r"|^ *(?:is|was|are|do|does|did|can|could|should|would|will)(?: ?(?:not|never)\b|n?['\u2019]t\b)",
    re.IGNORECASE,
)
_SPAN = re.compile(r"\$\$(.+?)\$\$|\$(?=\S)([^$\n]*[^\s\\])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# An escaped brace is a sign of a set, and belongs to the text.
_BRACE = re.compile(r"(?:\\boxed|(?<!\\))\{|(?<!\\)\}")


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...}, the inner one of two; None where there is none.

    Args:
        text: Of any length and any form; the time is linear.
    """
    opened: list[int] = []
    found = (0, 0)
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(0 if brace[0] == "{" else brace.end())
        elif opened:
            found = max(found, (opened.pop(), brace.start()))
    return text[found[0] : found[1]] if found[0] else None


def without_markup(text: str) -> str:
    """Return the end of a response without markdown's and HTML's emphasis."""
    text = _TAG.sub("", text[-_TAIL:])
    for _ in range(2):
        text = _MARKUP.sub(r"\2", text)
    return text


def _lenient(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None or "\\boxed{" in text:
        return boxed
    tail = without_markup(text)
    stated = last_match(_STATED, tail)
    return _clause(stated[1] or tail[stated.end() :]) if stated else _last_value(tail)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the match that ends last; None for no match."""
    return max(pattern.finditer(text), key=re.Match.end, default=None)


def _clause(text: str) -> str:
    """Return the answer of "the answer is ...": the line without what only introduces or explains it."""
    line = next(_LINE.finditer(text.strip(" \n\t#*_`")))[1].rstrip("*_` ")
    # A sentence does not continue inside mathematics.
    rest = _REST.search(_SPAN.sub(lambda span: "0" * len(span[0]), line), 1)
    line = line[: rest.start()] if rest else line
    return line.strip(" \t\"'\u201c\u201d\u2018\u2019*_`").rstrip("!?\u2713\u2714\u2705\u220e\u25a0 ")


def _last_value(text: str) -> str | None:
    """Return the last number, or the formula that stands behind it or around it; None where it is negated."""
    number = last_match(_NUMBER, text)
    span = last_match(_SPAN, text)
    last = span if span and (number is None or span.end() > number.end()) else number
    if last is None or any(map(_NEGATED.search, (text[: last.start()], text[last.end() :]))):
        return None
    return next(filter(None, last.groups()), last[0])


def _dapo(text: str) -> str | None:
    found = re.findall(r"answer\s*:\s*([^\n]+)", without_markup(text[-DAPO_TAIL:]), re.IGNORECASE)
    if not found:
        return None
    boxed = last_boxed(found[-1])
    return boxed if boxed is not None else _clause(found[-1])


# Where each grader finds the answer of a response; docs/rewards.md describes them.
CONVENTIONS: Mapping[str, Callable[[str], str | None]] = {
    "math": last_boxed,
    "math_answer": _lenient,
    "math_dapo": _dapo,
    "math_deepscaler": lambda text: last_boxed(text.rpartition("</think>")[2]) if "</think>" in text else None,
}


def score(name: str, answer: Answer) -> float:
    """Return 1.0 where the answer that a convention finds is the label, or one of its labels."""
    found = None if answer.is_truncated else CONVENTIONS[name](answer.text)
    return float(bool(found) and any(are_equal(found or "", label) for label in labels_of(answer.label)))


def labels_of(label: Any) -> list[str]:
    """Return the admissible answers of a label.

    Args:
        label: Text (plain, LaTeX, \\boxed{...}, or a solution that ends in "#### 72" or has a box), a number, or a
            list of these, any of which is right.

    Raises:
        ValueError: For null, an object, NaN or infinity.
    """
    if isinstance(label, (list, tuple)):
        return [answer for one in label for answer in labels_of(one)]
    if isinstance(label, int):
        return [str(label)]
    if isinstance(label, float) and math.isfinite(label):
        return [format(Decimal(repr(label)), "f")]
    if not isinstance(label, str):
        raise ValueError(f"no label for mathematics: {label!r}; allowed are text, numbers and lists of them")
    boxed = last_boxed(label)
    return [label.rpartition("####")[2].strip() if boxed is None else boxed]

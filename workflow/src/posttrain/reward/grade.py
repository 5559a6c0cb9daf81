"""Text and label to a score. Pure Python, and nothing of the model's text is ever evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from posttrain.config.reward import Reward
from posttrain.reward.answer import Answer, Grade
from posttrain.types import label_text

# Thousands are grouped by commas ("1,234,567"); "1,2" is two numbers. No exponents: "1e999999999" would be a number
# that no memory holds.
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"-?(?:{_DECIMAL})(?:\s*/\s*(?:{_DECIMAL}))?", re.ASCII)
_QUOTIENT = re.compile(rf"(-?)({_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?)([\d.,]+)\}\{([\d.,]+)\}")
# No answer is longer; exact fractions of a text of any length would take the time that a response chooses.
_MAX_NUMBER_LENGTH = 200


def exact_match(response: str, label: str) -> float:
    """Return 1.0 when the response is the label, white space at both ends apart."""
    return float(response.strip() == label.strip())


def math_answer(response: str, label: str) -> float:
    """Return 1.0 when the final answer of the response equals the label.

    The final answer is the content of the last \\boxed{...}, or else the last number. Numbers are compared as exact
    fractions ("0.5" equals "1/2" and "\\frac{1}{2}", "1,000" equals "1000"); anything else as text.
    """
    answer = _last_boxed(response)
    if answer is None:
        numbers = _NUMBER.findall(response)
        answer = numbers[-1] if numbers else ""
    expected = _last_boxed(label)
    expected = label if expected is None else expected
    left, right = _as_fraction(answer), _as_fraction(expected)
    if left is not None and right is not None:
        return float(left == right)
    return float(bool(answer.strip()) and answer.strip() == expected.strip())


@dataclass(frozen=True)
class Rule:
    """How a grader that the project brings works.

    Args:
        function: Gives a response its score; None where the grader does not apply.
        needs_label: Off, it looks at the response alone.
        is_instant: It can neither hang nor take much memory, whatever the response is.
    """

    function: Callable[[Answer, Reward], float | None]
    needs_label: bool = True
    is_instant: bool = False


GRADERS: Mapping[str, Rule] = {
    "exact_match": Rule(lambda answer, _: exact_match(answer.text, label_text(answer.label)), is_instant=True),
    "math_answer": Rule(lambda answer, _: math_answer(answer.text, label_text(answer.label))),
}


@dataclass(frozen=True)
class BuiltIn:
    """A grader of `GRADERS`, ready to be sent to a worker process.

    Args:
        name: Its name.
        settings: The configuration's section.
    """

    name: str
    settings: Reward
    takes_groups: ClassVar[bool] = False

    @property
    def is_instant(self) -> bool:
        """See `Rule`."""
        return GRADERS[self.name].is_instant

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
        """Return the grade of each answer."""
        return tuple(Grade(GRADERS[self.name].function(answer, self.settings)) for answer in answers)


def _last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            if depth == 0:
                return text[begin:place]
            depth -= 1
    return None


def _as_fraction(text: str) -> Fraction | None:
    """Return the exact value of "-1,234", "3.50", "2/3", "$5", "50\\%" or "\\frac{2}{3}"; None for anything else."""
    plain = re.sub(r"\s+|\$|\\[,!]|\\?%", "", text)
    plain = re.sub(r"frac(\d)(\d)", r"frac{\1}{\2}", plain)
    if latex := _LATEX_FRACTION.fullmatch(plain):
        outer, inner, top, bottom = latex.groups()
        plain = f"{'-' if outer != inner else ''}{top}/{bottom}"
    quotient = _QUOTIENT.fullmatch(plain) if len(plain) <= _MAX_NUMBER_LENGTH else None
    if quotient is None:
        return None
    sign, numerator, denominator = quotient.groups()
    bottom_value = Fraction((denominator or "1").replace(",", ""))
    if bottom_value == 0:
        return None
    value = Fraction(numerator.replace(",", "")) / bottom_value
    return -value if sign else value

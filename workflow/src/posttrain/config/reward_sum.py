"""`data.reward`: one grader, or several with weights, as a sum.

    math                           one grader
    math + 0.2*format              the score of math plus a fifth of format's score
    rewards.py:score + -0.1*length the user's own grader, minus a tenth of length's score

The first grader decides whether a response passes; the others shape the reward. A grader that does not apply to a
response (None) adds nothing; a response without any applicable grader has no reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.errors import ConfigError, Problem

# Score of a first grader for a right answer.
PASSING_SCORE = 1.0
# The trainer computes differences of rewards in FP32 and doubles them: a quarter of the largest FP32 number is safe.
MAX_NUMBER = 2.0**126
_TERM = re.compile(r"\s*(?:(?P<weight>-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*\s*)?(?P<name>[^\s*]+)\s*")


@dataclass(frozen=True)
class Term:
    """A grader and the weight of its score.

    Args:
        grader: A name in `rl.reward.grade.GRADERS`, the name of a service or judge, or `path.py:function`.
        weight: A finite number except 0.
    """

    grader: str
    weight: float = 1.0

    @property
    def is_own(self) -> bool:
        """Whether the grader is the user's own function."""
        return ":" in self.grader

    @property
    def column(self) -> str:
        """The name of the grader's scores in metrics and samples."""
        return self.grader.rpartition(":")[2]


def parse_reward(text: str, key: str = "data.reward") -> tuple[Term, ...]:
    """Return the terms of a reward, in order.

    Args:
        text: See the module docstring.
        key: Its configuration key, for the message.

    Raises:
        ConfigError: The text is malformed, a weight is 0 or not finite, or two terms have the same name.

    Example:
        "math + 0.2*format" -> (Term("math", 1.0), Term("format", 0.2))
    """
    matches = [_TERM.fullmatch(part) for part in text.split("+")]
    allowed = "graders with weights as in 'math + 0.2*format'"
    if not all(matches):
        raise ConfigError([Problem("not-a-reward-sum", key, repr(text), allowed, "write it as a sum of WEIGHT*GRADER")])
    terms = tuple(Term(match["name"], float(match["weight"] or 1)) for match in matches if match)
    wrong = [term.grader for term in terms if not term.weight or not math.isfinite(term.weight)]
    if wrong:
        remedy = f"leave {', '.join(wrong)} out, or give it a weight"
        raise ConfigError(
            [Problem("reward-weight", key, repr(text), f"{allowed}, no weight 0 and none infinite", remedy)]
        )
    columns = [term.column for term in terms]
    if len(set(columns)) < len(columns):
        twice = sorted({column for column in columns if columns.count(column) > 1})
        remedy = f"name each once: {', '.join(twice)} would be one column"
        raise ConfigError([Problem("named-twice", key, repr(text), f"{allowed}, each of another name", remedy)])
    return terms


def is_usable(number: float) -> bool:
    """Return whether the trainer can compute with a score, reward or metric; NaN and infinity are not usable."""
    return abs(number) <= MAX_NUMBER


def total(terms: Sequence[Term], scores: Mapping[str, float | None]) -> float | None:
    """Return the reward of a response; None if no grader applies.

    Args:
        terms: From `parse_reward`.
        scores: Column -> score; None if the grader does not apply.

    Raises:
        OverflowError: A product or the sum is not usable; names the grader.

    Example:
        "math + 0.2*format" with math 1 and format 0.5: 1.1; with math None: 0.1.
    """
    found = {term: term.weight * score for term in terms if (score := scores[term.column]) is not None}
    if not found:
        return None
    remedy = f"beyond {MAX_NUMBER:.1e}: lower the weight, or scale the grader's scores"
    for term, value in found.items():
        if not is_usable(value):
            raise OverflowError(
                f"{term.weight:g}*{term.column} is {value:g} with a score of {scores[term.column]:g}, {remedy}"
            )
    # Every term is at most this large, so a sum of fewer than 2**800 terms fits a float.
    reward = math.fsum(found.values())
    if not is_usable(reward):
        terms_shown = " + ".join(f"{term.weight:g}*{term.column} = {value:g}" for term, value in found.items())
        raise OverflowError(f"{terms_shown} add up to {reward:g}, {remedy}")
    return reward


def has_passed(scores: Mapping[str, float | None], reward: float) -> bool:
    """Return whether a response passes: by its first applicable grader, or by its reward if it has none."""
    first = next((score for score in scores.values() if score is not None), reward)
    return first >= PASSING_SCORE

"""One call of a grader, and the validation of its result."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.reward_sum import MAX_NUMBER, is_usable
from posttrain.errors import one_line
from posttrain.rl.reward.answer import Answer, Failure, Grade

Grades = tuple[Grade, ...]

# Limit per answer: every name becomes a chart.
MAX_METRICS, MAX_NAME_CHARACTERS = 100, 200
MAX_REASON_CHARACTERS, MAX_SHOWN_CHARACTERS = 1000, 80
_LIBRARY = Path(__file__).resolve().parents[2]
NUMBERS = f"a number between {-MAX_NUMBER:.1e} and {MAX_NUMBER:.1e}, which FP32 can hold"


@dataclass(frozen=True)
class Job:
    """Answers that one call of a grader grades.

    Args:
        grader: Maps answers to a grade each; picklable.
        answers: One, or those of a group.
        is_instant: It cannot hang, so it runs in the calling process.
        source: The user's file that defines the grader; "" for a built-in one.
    """

    grader: Callable[[tuple[Answer, ...]], Grades | Failure]
    answers: tuple[Answer, ...]
    is_instant: bool = False
    source: str = ""


def grade_job(job: Job) -> Grades | Failure:
    """Return the grades of a job's answers, or a failure if its grader raised.

    Raises:
        MemoryError: The grader ran out of memory.
    """
    try:
        found = job.grader(job.answers)
        if isinstance(found, Failure):
            return found
        grades = tuple(found)
        if len(grades) != len(job.answers):
            raise ValueError(f"{len(grades)} grades for {len(job.answers)} answers")
        return tuple(checked(grade, answer) for grade, answer in zip(grades, job.answers, strict=True))
    except MemoryError:
        raise
    except Exception as error:
        return Failure("error", reason_of(error, job.source))


def checked(grade: Grade, answer: Answer) -> Grade:
    """Return a grade of plain floats, because other types might not cross the process boundary.

    Raises:
        ValueError: A value is invalid, or there are too many; names it and the answer.
    """
    score = None if grade.score is None else float(grade.score)
    if score is not None and not is_usable(score):
        raise ValueError(f"a score of {score:g} for {_shown(answer)}; expected None or {NUMBERS}: scale or clip it")
    return Grade(score, checked_metrics(grade.parts))


def checked_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return a grade's further numbers as plain floats.

    Raises:
        ValueError: There are too many, a name is too long, or a value is invalid.
    """
    if len(values) > MAX_METRICS:
        raise ValueError(f"{len(values)} metrics for one answer; at most {MAX_METRICS} are kept: give fewer names")
    found = {}
    for name, value in values.items():
        if len(str(name)) > MAX_NAME_CHARACTERS:
            raise ValueError(f"a metric's name has {len(str(name))} characters; at most {MAX_NAME_CHARACTERS} are kept")
        found[str(name)] = checked_metric(name, value)
    return found


def checked_metric(name: object, value: Any) -> float:
    """Return a further number as a plain float.

    Raises:
        ValueError: The value is invalid; names it.
    """
    number = float(value)
    if not is_usable(number):
        raise ValueError(f"metric {str(name)[:MAX_NAME_CHARACTERS]!r} is {number:g}; expected {NUMBERS}: leave it out")
    return number


def _shown(answer: Answer) -> str:
    more = "..." if len(answer.text) > MAX_SHOWN_CHARACTERS else ""
    return f"the response {answer.text[:MAX_SHOWN_CHARACTERS]!r}{more}"


def reason_of(error: BaseException, source: str = "") -> str:
    """Return an exception as one line of bounded length, with the raising line of the user's code.

    Args:
        error: The caught exception.
        source: The user's file; "" shows the innermost line of any file.

    Example:
        "KeyError: 'gold' (rewards.py:12, in score)"
    """
    text = "it cannot be shown"
    # `str(error)` may run the user's code, too.
    with contextlib.suppress(Exception):
        text = str(error)
    if len(text) > MAX_REASON_CHARACTERS:
        text = f"{text[:MAX_REASON_CHARACTERS]}... ({len(text)} characters)"
    place = _place(error, source)
    return f"{type(error).__name__[:MAX_SHOWN_CHARACTERS]}: {one_line(text)}{f' ({place})' if place else ''}"


def _place(error: BaseException, source: str) -> str:
    """Return the innermost line of the user's code in a traceback; "" if there is none."""
    if not source:
        return ""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    folder = str(Path(source).resolve().parent)
    near = [(code, line) for code, line in frames if _is_beside(code.co_filename, folder)]
    return next((f"{code.co_filename}:{line}, in {code.co_name}" for code, line in reversed(near)), "")


def _is_beside(file: str, folder: str) -> bool:
    if file.startswith("<"):  # code executed from a string
        return False
    path = Path(file).resolve()
    is_installed = bool({"site-packages", "dist-packages"} & {*path.parts})
    return path.is_relative_to(folder) and not is_installed and not path.is_relative_to(_LIBRARY)

"""Grades an episode with what its environment says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posttrain.rl.reward.answer import Answer, Failure, Grade

NAME = "environment"


@dataclass(frozen=True)
class EnvironmentGrader:
    """The grader `environment`: an episode's reward was asked for when it ended."""

    takes_groups: ClassVar[bool] = False
    source: ClassVar[str] = ""
    is_instant: ClassVar[bool] = True
    needs_label: ClassVar[bool] = False

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...] | Failure:
        """Return the grade of an episode, or why its environment failed."""
        (answer,) = answers
        if isinstance(answer.environment, Failure):
            return answer.environment
        return (answer.environment or Grade(None),)

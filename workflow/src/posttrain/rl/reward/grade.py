"""The built-in graders by name: pure Python that never evaluates the model's text as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from posttrain.rl.reward import mathematics, shape, task, text
from posttrain.rl.reward.answer import Answer, Grade
from posttrain.rl.reward.shape import ShapeSettings


@dataclass(frozen=True)
class Grader:
    """A built-in grader.

    Args:
        function: Maps an answer to its score; None if it does not apply.
        needs_label: It does not apply to answers without a label.
        is_instant: It cannot hang, so it needs no worker process.
    """

    function: Callable[[Answer, ShapeSettings], float | None]
    needs_label: bool = True
    is_instant: bool = False


def _plain(function: Callable[[Answer], float]) -> Callable[[Answer, ShapeSettings], float]:
    return lambda answer, settings: function(answer)


GRADERS: Mapping[str, Grader] = {
    "exact_match": Grader(_plain(text.exact_match), is_instant=True),
    "choice": Grader(_plain(text.choice), is_instant=True),
    "f1": Grader(_plain(text.f1), is_instant=True),
    **{name: Grader(_plain(partial(mathematics.score, name))) for name in mathematics.CONVENTIONS},
    "format": Grader(shape.format_tags, needs_label=False),
    "length": Grader(shape.length, needs_label=False, is_instant=True),
    "overlong": Grader(shape.overlong, needs_label=False, is_instant=True),
    "repetition": Grader(shape.repetition, needs_label=False, is_instant=True),
    "reasoning_gym": Grader(task.reasoning_gym),
}


def grade(name: str, answer: Answer, settings: ShapeSettings | None = None) -> Grade:
    """Return the grade of an answer.

    Args:
        name: A built-in grader, key of `GRADERS`.
        answer: The answer to grade.
        settings: Settings of the format graders; defaults if None.

    Returns:
        The grade; its score is None if the grader needs a label and the answer has none.

    Raises:
        KeyError: For a name that no grader has.
        ValueError: For a label that the grader cannot read.
    """
    grader = GRADERS[name]
    if grader.needs_label and answer.label is None:
        return Grade(None)
    return Grade(grader.function(answer, settings or ShapeSettings()))

"""Grades by the task of reasoning-gym that has made a row."""

from __future__ import annotations

from posttrain.config.tasks import load_task
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.shape import ShapeSettings


def reasoning_gym(answer: Answer, settings: ShapeSettings) -> float:
    """Return the task's own score: of the last `<answer>...</answer>`, or of the whole response where there is none.

    A truncated response has given no answer, which is for each task to judge.

    Raises:
        KeyError: The row is from no task.
        ConfigError: The package that is installed does not have the task.
    """
    from reasoning_gym.utils import extract_answer

    task = answer.columns["task"]
    stated = extract_answer(answer.text)
    text = answer.text.strip() if stated is None else stated
    grader = load_task(task["name"], tuple(task["parameters"]))
    return float(grader.score_answer(None if answer.is_truncated else text, dict(answer.columns["entry"])))

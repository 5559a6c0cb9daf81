"""Grades with the reasoning-gym task that generated a row."""

from __future__ import annotations

from posttrain.config.tasks import load_task
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.shape import ShapeSettings


def reasoning_gym(answer: Answer, settings: ShapeSettings) -> float:
    """Return the task's score of the last `<answer>...</answer>`, or of the whole response if there is none.

    A truncated response counts as no answer, which each task scores itself.

    Raises:
        KeyError: The row is not from a task.
        ConfigError: The installed package lacks the task.
    """
    from reasoning_gym.utils import extract_answer

    task = answer.columns["task"]
    stated = extract_answer(answer.text)
    text = answer.text.strip() if stated is None else stated
    grader = load_task(task["name"], tuple(task["parameters"]))
    return float(grader.score_answer(None if answer.is_truncated else text, dict(answer.columns["entry"])))

"""Answers graded by the task that has made the row: by its own function, and nobody else's."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata

import pytest

from posttrain.config.data import Data
from posttrain.rl.data.dataset_files import reading_of
from posttrain.rl.data.reasoning_gym import generate_rows
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.grade import grade
from posttrain.rl.reward.graders import BuiltIn, GraderPool
from posttrain.rl.reward.job import Job
from posttrain.rl.reward.shape import ShapeSettings

DATA = Data(
    kind="reasoning_gym",
    num_train_prompts=6,
    num_heldout_prompts=2,
    seed=7,
    reward="reasoning_gym",
    reasoning_gym=importlib.metadata.version("reasoning-gym"),
)


def answer(text: str, task: str = "number_sorting", words: tuple[str, ...] = (), **more) -> Answer:
    data = dataclasses.replace(DATA, task=task, task_parameters=list(words))
    row = generate_rows(data, reading_of(data))[0][0]
    return Answer(text.replace("LABEL", row.label), row.label, row.messages, columns=row.columns, **more)


def score(*arguments, **more) -> float | None:
    return grade("reasoning_gym", answer(*arguments, **more)).score


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("LABEL", 1.0),
        (" LABEL\n", 1.0),
        ("<answer>LABEL</answer>", 1.0),
        ("I sort them: <answer>['1.0']</answer>, no: <answer>\nLABEL\n</answer> it is.", 1.0),
        ("<answer>LABEL</answer><answer>['1.0']</answer>", 0.0),
        ("It is LABEL", 0.0),
        ("<answer>LABEL", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_answer_in_tags_or_else_the_whole_response(text: str, wanted: float) -> None:
    assert score(text) == wanted


def test_a_truncated_response_has_given_no_answer() -> None:
    assert score("LABEL", is_truncated=True) == 0.0


def test_the_score_is_the_tasks_own() -> None:
    """Its `spell_backward` gives a share for each letter in its place."""
    words = ("min_word_len=4", "max_word_len=4")
    right = answer("LABEL", "spell_backward", words)
    half = dataclasses.replace(right, text=right.label[:2] + "--")
    assert (grade("reasoning_gym", right).score, grade("reasoning_gym", half).score) == (1.0, 0.5)


def test_it_grades_in_the_workers_and_a_row_of_no_task_is_a_failure() -> None:
    grader = BuiltIn("reasoning_gym", ShapeSettings())
    assert not grader.is_instant
    assert grader.needs_label
    with GraderPool(5.0, num_workers=1, modules=["reasoning_gym"]) as pool:
        jobs = [Job(grader, (one,)) for one in (answer("LABEL"), answer("[]"), Answer("4", "4"))]
        right, wrong, none = asyncio.run(pool.grade_all(jobs))
    assert (right[0].score, wrong[0].score) == (1.0, 0.0)
    assert (none.kind, none.reason) == ("error", "KeyError: 'task'")

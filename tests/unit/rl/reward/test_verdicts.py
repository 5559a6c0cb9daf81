"""Answers with verdicts from before the graders first read them (verdicts.tsv), and answers of no meaning."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.random_answers import random_answers

from posttrain.rl.reward.answer import Answer, Failure
from posttrain.rl.reward.equality import are_equal
from posttrain.rl.reward.grade import grade
from posttrain.rl.reward.graders import BuiltIn, GraderPool, Job
from posttrain.rl.reward.shape import ShapeSettings

LINES = [
    line.split("\t") for line in Path(__file__).with_name("verdicts.tsv").read_text().splitlines() if line[0] != "#"
]
TABLE = [(int(verdict), kind, grader, label, said.replace("⏎", "\n")) for verdict, kind, grader, label, said in LINES]
# Right answers that score 0. No wrong one scores 1.
MISSED = {
    "The answer is 42 when all 6 rows are full.",
    r"\boxed{30^\circ \cdot \frac{\pi}{180^\circ}}",
}
# A number, an expression, and structures of every kind that equality reads.
LABELS = ("7", r"\frac{x}{2}+\sqrt{3}", r"[0,1] \cup \{2\}", "1, 2", "x < 3", r"5\text{ cm}")


def test_the_table_has_enough_of_both_verdicts() -> None:
    assert len(TABLE) >= 600
    assert sum(not verdict for verdict, *_ in TABLE) >= len(TABLE) / 2
    assert Counter(kind for _, kind, *_ in TABLE)["sentence"] >= 108


def test_nearly_every_right_answer_of_the_table_has_full_marks() -> None:
    right = [said for verdict, _, _, _, said in TABLE if verdict]
    assert {*right} >= MISSED
    assert len(MISSED) <= 0.05 * len(right)


@pytest.mark.parametrize("kind", sorted({kind for _, kind, *_ in TABLE}))
def test_the_table_is_graded_as_it_says(kind: str) -> None:
    rows = [row for row in TABLE if row[1] == kind and row[-1] not in MISSED]
    assert not [row for row in rows if grade(row[2], Answer(row[4], row[3])).score != row[0]]


def test_the_sides_of_equality_can_be_swapped() -> None:
    pairs = {(said[7:-1], label) for _, _, grader, label, said in TABLE if grader == "math"}
    assert not [(said, label) for said, label in pairs if are_equal(said, label) != are_equal(label, said)]


def test_random_answers_are_graded_alike_from_both_sides() -> None:
    texts = [text.removeprefix("\\boxed{") for text in random_answers(150, seed=2)]
    pairs = list(zip(texts, texts[1:] + texts[:1], strict=True)) + [
        (text, LABELS[place % 6]) for place, text in enumerate(texts)
    ]
    assert not [pair for pair in pairs if are_equal(*pair) != are_equal(*reversed(pair))]


@pytest.mark.faults("graders")
@pytest.mark.timeout(1200)
def test_10_000_random_answers_end_within_the_deadline() -> None:
    graders = ("math", "math_answer", "math_dapo", "choice")
    jobs = [
        Job(BuiltIn(name, ShapeSettings()), (Answer(text, "C" if name == "choice" else LABELS[place % 6]),))
        for place, text in enumerate(random_answers(10_000, seed=3))
        for name in [graders[place // 2 % 4]]
    ]
    started = time.perf_counter()
    with GraderPool() as pool:
        outcomes = asyncio.run(pool.grade_all(jobs))
    print(f"{time.perf_counter() - started:.0f} s")
    failed = [(job.answers, found) for job, found in zip(jobs, outcomes, strict=True) if isinstance(found, Failure)]
    assert not failed

"""Graders that hang, crash, raise or want all memory cost themselves, and no other answer its grade."""

import asyncio
import os
import time
from dataclasses import dataclass
from typing import ClassVar

import psutil
import pytest

from posttrain.reward.answer import Answer, Failure, Grade
from posttrain.reward.graders import BuiltIn, GraderPool, Job
from posttrain.reward.shape import ShapeSettings

DEADLINE_SECONDS = 1.0


@dataclass(frozen=True)
class Misbehaving:
    """Grades; but "hang" never ends, "fail" raises, "die" ends its process, "swell" wants all memory."""

    takes_groups: ClassVar[bool] = False
    is_instant: ClassVar[bool] = False

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
        text = answers[0].text
        while text == "hang":
            pass
        if text == "fail":
            raise ValueError("a grader with a defect")
        if text == "die":
            os._exit(3)
        if text == "swell":
            return (Grade(float(len(bytearray(8 * 2**30)))),)
        return tuple(Grade(float(answer.text == "42")) for answer in answers)


def ask(pool: GraderPool, *texts: str) -> list[float | str]:
    """Return the score of each text, or what kind of failure it was."""
    results = asyncio.run(pool.grade_all([Job(Misbehaving(), (Answer(text),)) for text in texts]))
    return [result.kind if isinstance(result, Failure) else result[0].score for result in results]


@pytest.fixture(scope="module")
def pool():
    with GraderPool(DEADLINE_SECONDS, num_workers=2) as pool:
        ask(pool, "42", "42")  # workers have started
        yield pool


def test_a_hanging_grader_costs_its_own_answer_only(pool):
    # Both workers hang at first, and are replaced: the others are graded all the same.
    found = ask(pool, "hang", "hang", "42", "41", "hang", "42")
    assert found == ["deadline", "deadline", 1.0, 0.0, "deadline", 1.0]


def test_the_hanging_processes_are_gone(pool):
    ask(pool, "hang", "42")
    ask(pool, "42", "42")
    spinning = [child for child in psutil.Process().children(recursive=True) if child.cpu_percent(0.3) > 50]
    assert not spinning, [child.cmdline() for child in spinning]


def test_a_crash_and_an_exception_cost_their_own_answer_only(pool):
    assert ask(pool, "42", "die", "fail", "41", "die", "42") == [1.0, "crash", "error", 0.0, "crash", 1.0]


def test_an_answer_does_not_take_the_nodes_memory(pool):
    assert ask(pool, "42", "swell", "42") == [1.0, "crash", 1.0]


def test_what_it_said_is_told(pool):
    (result,) = asyncio.run(pool.grade_all([Job(Misbehaving(), (Answer("fail"),))]))
    assert result == Failure("error", "ValueError: a grader with a defect")


def test_a_group_has_the_time_of_all_its_answers(pool):
    (grades,) = asyncio.run(pool.grade_all([Job(Misbehaving(), (Answer("41"), Answer("42")))]))
    assert [grade.score for grade in grades] == [0.0, 1.0]


def test_comparing_strings_needs_no_process():
    with GraderPool(num_workers=1) as pool:
        started = time.perf_counter()
        jobs = [
            Job(BuiltIn("exact_match", ShapeSettings()), (Answer(text, "42"),), is_instant=True)
            for text in ("42", " 42", "41")
        ]
        assert [grades[0].score for grades in asyncio.run(pool.grade_all(jobs))] == [1.0, 1.0, 0.0]
        assert time.perf_counter() - started < 0.2

import asyncio
import time

import psutil
import pytest
from tests.support.obedient_grader import ElsewhereOnly, obey

from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.graders import BuiltIn, GraderPool
from posttrain.rl.reward.job import Job
from posttrain.rl.reward.shape import ShapeSettings

DEADLINE_SECONDS = 2.0


def grade_all(pool, *texts, grader=obey):
    return asyncio.run(pool.grade_all([Job(grader, (Answer(text),)) for text in texts]))


def said(outcomes):
    return [outcome.kind if isinstance(outcome, Failure) else outcome[0].score for outcome in outcomes]


def is_spinning(process):
    try:
        return process.cpu_percent(0.3) > 50
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def pool():
    with GraderPool(DEADLINE_SECONDS, num_workers=2) as pool:
        yield pool


def test_a_hanging_grader_costs_its_own_answer_only(pool):
    # Both workers hang at first, and are replaced: the others are graded all the same.
    outcomes = grade_all(pool, "hang", "hang", "42", "41", "hang", "42")
    assert said(outcomes) == ["deadline", "deadline", 1.0, 0.0, "deadline", 1.0]
    assert outcomes[0].reason == "not graded within 2 s"


def test_the_hanging_processes_are_gone(pool):
    grade_all(pool, "hang", "42")
    # A worker that takes the place of another one computes while it starts, and then no more.
    until = time.monotonic() + 60
    while spinning := [child for child in psutil.Process().children(recursive=True) if is_spinning(child)]:
        assert time.monotonic() < until, spinning


def test_of_answers_that_share_a_worker_only_the_guilty_one_fails(pool):
    texts = ["42", "41"] * 50
    for place, text in ((3, "hang"), (40, "die"), (77, "fail"), (78, "fill")):
        texts[place] = text
    outcomes = said(grade_all(pool, *texts))
    wanted = [1.0, 0.0] * 50
    wanted[3], wanted[40], wanted[77], wanted[78] = "deadline", "crash", "error", "crash"
    assert outcomes == wanted


def test_the_deadline_is_each_answer_s_own(pool):
    # Naps of 1.2 s, two in each worker, are late together though none of them is alone.
    assert said(grade_all(pool, *["nap"] * 4, *["42"] * 14)) == [*[0.0] * 4, *[1.0] * 14]


def test_a_group_has_as_many_deadlines_as_answers(pool):
    (grades,) = asyncio.run(pool.grade_all([Job(obey, (Answer("nap"), Answer("nap")))]))
    assert [grade.score for grade in grades] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("die", "crash", "the worker died with exit code 3"),
        ("fail", "error", "ValueError: a grader with a defect"),
        ("fill", "crash", "the worker had no memory left"),
        ("few", "error", "ValueError: 0 grades for 1 answers"),
    ],
)
def test_a_failure_says_what_happened(pool, text, kind, reason):
    assert grade_all(pool, text, "42") == [Failure(kind, reason), (Grade(1.0, {"length": 2.0}),)]


def test_a_grader_that_workers_cannot_import_is_an_error(pool):
    outcomes = grade_all(pool, "42", grader=ElsewhereOnly())
    assert outcomes == [Failure("error", "KeyError: 'no such module'")]
    assert said(grade_all(pool, "42")) == [1.0]


def test_workers_that_are_killed_from_outside_are_replaced(pool):
    grade_all(pool, "42")
    for child in psutil.Process().children():
        if "posttrain.rl.reward.worker" in child.cmdline():
            child.kill()
    assert said(grade_all(pool, "42", "41", "42")) == [1.0, 0.0, 1.0]


def test_the_answers_of_a_group_are_graded_together(pool):
    group = Job(obey, (Answer("42"), Answer("41"), Answer("42")))
    assert asyncio.run(pool.grade_all([group, group])) == [(obey(group.answers))] * 2


def test_an_instant_grader_needs_no_process():
    before = psutil.Process().children()
    with GraderPool(num_workers=1) as pool:
        started = time.perf_counter()
        grader = BuiltIn("exact_match", ShapeSettings())
        jobs = [Job(grader, (Answer(text, "42"),), grader.is_instant) for text in ("42", " 42", "41")]
        outcomes = asyncio.run(pool.grade_all(jobs))
        assert said(outcomes) == [1.0, 1.0, 0.0]
        assert psutil.Process().children() == before
        assert time.perf_counter() - started < 0.2

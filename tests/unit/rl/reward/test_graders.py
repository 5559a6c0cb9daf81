import asyncio

import psutil
import pytest
from tests.support.obedient_grader import ElsewhereOnly, obey

from posttrain.rl.reward import graders
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.graders import BuiltIn, GraderPool, Worker
from posttrain.rl.reward.job import Job
from posttrain.rl.reward.shape import ShapeSettings

DEADLINE_SECONDS = 2.0


def grade_all(pool, *texts, grader=obey):
    return asyncio.run(pool.grade_all([Job(grader, (Answer(text),)) for text in texts]))


def said(outcomes):
    return [outcome.kind if isinstance(outcome, Failure) else outcome[0].score for outcome in outcomes]


def workers():
    return [child for child in psutil.Process().children() if "posttrain.rl.reward.worker" in child.cmdline()]


@pytest.fixture(scope="module")
def pool():
    with GraderPool(DEADLINE_SECONDS, num_workers=2) as pool:
        yield pool


def test_a_hanging_grader_costs_its_own_answer_only(pool):
    grade_all(pool, *["42"] * 4)
    before = workers()
    # Both workers hang at first, and are replaced: the others are graded all the same.
    outcomes = grade_all(pool, "hang", "hang", "42", "41", "hang", "42")
    assert said(outcomes) == ["deadline", "deadline", 1.0, 0.0, "deadline", 1.0]
    assert outcomes[0].reason == "not graded within 2 s"
    assert len(before) == 2
    assert not [worker for worker in before if worker.is_running()]


def test_of_answers_that_share_a_worker_only_the_guilty_one_fails(pool):
    texts = ["42", "41"] * 50
    for place, text in ((3, "hang"), (40, "die"), (77, "fail"), (78, "fill")):
        texts[place] = text
    outcomes = said(grade_all(pool, *texts))
    wanted = [1.0, 0.0] * 50
    wanted[3], wanted[40], wanted[77], wanted[78] = "deadline", "crash", "error", "crash"
    assert outcomes == wanted


@pytest.fixture
def given(monkeypatch):
    """The seconds that workers were given for each job; they have them."""
    seconds = []

    class Noting(Worker):
        def grade(self, packed, deadline):
            seconds.append(deadline)
            return super().grade(packed, deadline)

    monkeypatch.setattr(graders, "Worker", Noting)
    return seconds


def test_the_deadline_is_each_answer_s_own(given):
    with GraderPool(DEADLINE_SECONDS, num_workers=2) as pool:
        assert said(grade_all(pool, *["42"] * 18)) == [1.0] * 18
    assert given == [DEADLINE_SECONDS] * 18


def test_a_group_has_as_many_deadlines_as_answers(given):
    with GraderPool(DEADLINE_SECONDS, num_workers=1) as pool:
        (grades,) = asyncio.run(pool.grade_all([Job(obey, (Answer("42"), Answer("41")))]))
    assert [grade.score for grade in grades] == [1.0, 0.0]
    assert given == [2 * DEADLINE_SECONDS]


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
    for worker in workers():
        worker.kill()
    assert said(grade_all(pool, "42", "41", "42")) == [1.0, 0.0, 1.0]


def test_the_answers_of_a_group_are_graded_together(pool):
    group = Job(obey, (Answer("42"), Answer("41"), Answer("42")))
    assert asyncio.run(pool.grade_all([group, group])) == [(obey(group.answers))] * 2


def test_an_instant_grader_needs_no_process(monkeypatch):
    monkeypatch.setattr(graders, "Worker", None)  # none can be started
    with GraderPool(num_workers=1) as pool:
        grader = BuiltIn("exact_match", ShapeSettings())
        jobs = [Job(grader, (Answer(text, "42"),), grader.is_instant) for text in ("42", " 42", "41")]
        outcomes = asyncio.run(pool.grade_all(jobs))
        assert said(outcomes) == [1.0, 1.0, 0.0]

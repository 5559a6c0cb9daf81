import asyncio
import os
import time

import psutil
import pytest

from posttrain.reward.grade import grade
from posttrain.reward.graders import GraderPool

DEADLINE_SECONDS = 1.0


def grade_or_hang(reward: str, response: str, label: str) -> float:
    """Grade; but "hang" never ends, "fail" raises, "die" ends its process."""
    while response == "hang":
        pass
    if response == "fail":
        raise ValueError("a grader with a defect")
    if response == "die":
        os._exit(3)
    return grade(reward, response, label)


def _grade_all(pool: GraderPool, responses: list[str], reward: str = "math_answer") -> tuple[list[float], int]:
    return asyncio.run(pool.grade_all(reward, responses, ["42"] * len(responses)))


@pytest.fixture(scope="module")
def pool():
    with GraderPool(DEADLINE_SECONDS, num_workers=2, grade_response=grade_or_hang) as pool:
        yield pool


def test_a_hanging_grader_costs_its_own_sample_only(pool):
    # Both workers hang at first, and are replaced: the others are graded all the same.
    scores, missed = _grade_all(pool, ["hang", "hang", "42", "41", "hang", "so 42"])
    assert scores == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert missed == 3


def test_the_hanging_processes_are_gone(pool):
    _grade_all(pool, ["hang", "42"])
    _grade_all(pool, ["42", "42"])
    spinning = [child for child in psutil.Process().children(recursive=True) if child.cpu_percent(0.3) > 50]
    assert not spinning, [child.cmdline() for child in spinning]


def test_the_pool_goes_on_after_a_miss(pool):
    assert _grade_all(pool, ["42", "7"]) == ([1.0, 0.0], 0)


@pytest.mark.parametrize("response", ["fail", "die"])
def test_a_failing_grader_ends_the_rollout_with_its_reason(pool, response):
    with pytest.raises(RuntimeError, match="a grader failed"):
        _grade_all(pool, ["42", response])
    assert _grade_all(pool, ["42"]) == ([1.0], 0)


def test_comparing_strings_needs_no_process():
    with GraderPool(num_workers=1) as pool:
        started = time.perf_counter()
        assert _grade_all(pool, ["42", " 42", "41"], reward="exact_match") == ([1.0, 1.0, 0.0], 0)
        assert time.perf_counter() - started < 0.2

"""Hostile responses cost their own grade at most: nothing crashes, and a bystander goes on."""

import asyncio
import resource
import time
from collections import Counter

import psutil
import pytest
from tests.support.abuse import GENERATORS, responses

from posttrain.rl.reward.answer import Answer, Failure
from posttrain.rl.reward.graders import BuiltIn, GraderPool
from posttrain.rl.reward.job import Job
from posttrain.rl.reward.shape import ShapeSettings

DEADLINE_SECONDS = 2.0
# For what was late once: on a busy machine that is no fault of the answer.
PATIENCE_SECONDS = 100.0
CONVENTIONS = ("math", "math_answer", "math_dapo", "math_deepscaler")
# A number, which most text is refused for at sight, and an expression, for which an answer has to be read.
LABELS = ("42", r"x^2+\sqrt{3}")
TICK_SECONDS = 0.05


async def grade_beside_a_bystander(pool, jobs):
    """Return the outcomes, and by how many seconds at most a task that shares the event loop was late."""
    delays = [0.0]

    async def watch():
        while True:
            started = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            delays.append(time.perf_counter() - started - TICK_SECONDS)

    watcher = asyncio.create_task(watch())
    outcomes = await pool.grade_all(jobs)
    watcher.cancel()
    return outcomes, delays


def takes_too_long(pool: GraderPool, job: Job) -> bool:
    """Tell whether a job needs more than the deadline by the time of a CPU: the clock's is the machine's affair.

    Args:
        pool: Of one worker, whose deadline is patient.
        job: To be graded.
    """
    asyncio.run(pool.grade_all([Job(job.grader, (Answer("", "42"),))]))
    (worker,) = [child for child in psutil.Process().children() if "posttrain.rl.reward.worker" in child.cmdline()]
    before = worker.cpu_times()
    (found,) = asyncio.run(pool.grade_all([job]))
    return isinstance(found, Failure) or sum(worker.cpu_times()[:2]) - sum(before[:2]) > DEADLINE_SECONDS


def _cpu_seconds_of_workers() -> float:
    """Return the time of a CPU of all processes that have ended: the clock's is the machine's affair."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def abuse(count: int) -> dict:
    """Grade hostile responses in all conventions in turn, and return what was measured."""
    asked = responses(count, seed=5)
    jobs = [
        Job(BuiltIn(CONVENTIONS[turn % 4], ShapeSettings()), (Answer(text, LABELS[turn // 4 % 2]),))
        for place, (_, text) in enumerate(asked)
        for turn in [place // len(GENERATORS)]
    ]
    me, started = psutil.Process(), _cpu_seconds_of_workers()
    with GraderPool(DEADLINE_SECONDS) as pool:
        before = me.memory_info().rss
        outcomes, delays = asyncio.run(grade_beside_a_bystander(pool, jobs))
        grown = me.memory_info().rss - before
    failed = {place: found for place, found in enumerate(outcomes) if isinstance(found, Failure)}
    late = [place for place, found in failed.items() if found.kind == "deadline"]
    if len(late) > count // 50:
        with GraderPool(PATIENCE_SECONDS, num_workers=1) as pool:
            late = [place for place in late if takes_too_long(pool, jobs[place])]
    return {
        "seconds": _cpu_seconds_of_workers() - started,
        "grown_mib": grown / 2**20,
        "delay_median": sorted(delays)[len(delays) // 2],
        "delay_most": max(delays),
        "late": Counter(asked[place][0] for place in late),
        "failed": {asked[place][0]: found for place, found in failed.items() if found.kind != "deadline"},
        "right": [asked[place][0] for place, found in enumerate(outcomes) if place not in failed and found[0].score],
    }


def check(seen: dict, count: int) -> None:
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in seen.items()})
    assert not seen["failed"]
    assert not seen["right"]
    assert seen["late"].total() <= count // 50, seen["late"]
    assert seen["grown_mib"] < 400


def test_there_are_twenty_kinds() -> None:
    assert len(GENERATORS) == 20


@pytest.mark.timeout(300)
def test_500_hostile_responses() -> None:
    check(abuse(500), 500)


@pytest.mark.faults("graders")
@pytest.mark.timeout(1200)
def test_10_000_hostile_responses() -> None:
    seen = abuse(10_000)
    check(seen, 10_000)
    assert seen["seconds"] < 600
    assert seen["delay_median"] < 0.1

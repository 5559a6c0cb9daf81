"""Grades in worker processes, with a deadline for each answer: one that hangs or crashes costs itself and no other."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from collections.abc import Sequence
from concurrent.futures import TimeoutError as DeadlineMissed
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from pebble import ProcessExpired, ProcessPool

from posttrain.config.reward import Reward
from posttrain.reward.answer import Answer, Failure, Grade

# What a failure tells of an exception: it is stored with the sample, and shown.
MAX_REASON = 300


class Grader(Protocol):
    """Grades answers to one prompt; it travels to a worker process."""

    @property
    def takes_groups(self) -> bool:
        """Whether it wants all answers to a prompt at once."""

    @property
    def is_instant(self) -> bool:
        """Whether it cannot hang or crash, so that it needs no process of its own."""

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
        """Return a grade for each answer."""


@dataclass(frozen=True)
class Job:
    """What is asked of a worker at a time.

    Args:
        grader: Grades.
        answers: One, or all answers to a prompt.
    """

    grader: Grader
    answers: tuple[Answer, ...]


class GraderPool:
    """Worker processes that grade; one that misses the deadline is killed and replaced.

    Args:
        deadline_seconds: Per answer; a job of several has as many times as long.
        num_workers: Processes; they start with the first answer that needs them.
        memory_gib: Address space that each may take.
    """

    def __init__(self, deadline_seconds: float = 10.0, num_workers: int = 2, memory_gib: float = 4.0):
        self._deadline = deadline_seconds
        # A trainer has threads and holds locks: workers start from a clean interpreter, not from a fork of it.
        context, limit = multiprocessing.get_context("spawn"), int(memory_gib * 2**30)
        self._pool = ProcessPool(num_workers, initializer=_limit_memory, initargs=(limit,), context=context)

    @classmethod
    def of(cls, settings: Reward) -> GraderPool:
        """Return the pool that a configuration asks for."""
        return cls(settings.deadline_seconds, settings.num_workers, settings.memory_gib)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.stop()
        self._pool.join()

    async def grade_all(self, jobs: Sequence[Job]) -> list[tuple[Grade, ...] | Failure]:
        """Return the grades of each job in order, or why there are none."""
        return list(await asyncio.gather(*map(self._grade, jobs)))

    async def _grade(self, job: Job) -> tuple[Grade, ...] | Failure:
        if job.grader.is_instant:
            return job.grader(job.answers)
        deadline = self._deadline * len(job.answers)
        try:
            return await asyncio.wrap_future(self._pool.schedule(job.grader, args=(job.answers,), timeout=deadline))
        except DeadlineMissed:
            return Failure("deadline", f"not graded within {deadline:g} s")
        except ProcessExpired as error:
            return Failure("crash", f"the process that graded it ended with {error.exitcode}")
        except Exception as error:
            # Whatever it is, it is the grader's, and is told as its failure.
            return Failure("error", f"{type(error).__name__}: {error}"[:MAX_REASON])


def _limit_memory(num_bytes: int) -> None:
    """An answer must not take the memory of the node that trains."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

"""Grades answers with a deadline each: a grader that hangs, or dies, costs its own answer, not the rollout."""

from __future__ import annotations

import asyncio
import importlib
import logging
import multiprocessing
import pickle
import resource
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as DeadlineMissed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

import psutil
from pebble import ProcessExpired, ProcessPool

from posttrain.config.schema import Config
from posttrain.reward.answer import Answer, Failure, Grade
from posttrain.reward.expression import warm_up
from posttrain.reward.grade import GRADERS, grade
from posttrain.reward.shape import ShapeSettings

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 10.0
NUM_WORKERS = 2
# Beyond what a worker has mapped when it starts: one answer cannot take the memory of the node.
MEMORY_BYTES = 1 << 30
# To start a worker takes a second, and on a machine that is busy with else much more.
_START_SECONDS = 180.0
# A plain number takes a tenth of a millisecond and a round trip to a worker ten times that: several share one.
_JOBS_PER_MESSAGE = 32

Grades = tuple[Grade, ...]


@dataclass(frozen=True)
class Job:
    """Answers that one call of a grader grades.

    Args:
        grader: Answers to a grade each; another process can import it.
        answers: One, or those of a group.
        is_instant: It cannot hang: it runs where it is called, without a process in between.
    """

    grader: Callable[[tuple[Answer, ...]], Grades]
    answers: tuple[Answer, ...]
    is_instant: bool = False


@dataclass(frozen=True)
class BuiltIn:
    """A built-in grader with its settings, which another process can import.

    Args:
        name: A key of `GRADERS`.
        settings: Of the graders of form.
    """

    name: str
    settings: ShapeSettings
    takes_groups: ClassVar[bool] = False

    @property
    def is_instant(self) -> bool:
        """See `Grader`."""
        return GRADERS[self.name].is_instant

    @property
    def needs_label(self) -> bool:
        """See `Grader`."""
        return GRADERS[self.name].needs_label

    def __call__(self, answers: tuple[Answer, ...]) -> Grades:
        """Return one grade per answer."""
        return tuple(grade(self.name, answer, self.settings) for answer in answers)


class GraderPool:
    """Worker processes that grade; one that misses the deadline is killed and replaced.

    Args:
        deadline_seconds: Per answer; a job of several has as many times as long.
        num_workers: Processes; they start with the first job that needs them.
        memory_bytes: What a worker may map beyond what it has at its start.
        modules: What a worker imports at its start, so that no answer has to wait for it.
    """

    def __init__(
        self,
        deadline_seconds: float = DEADLINE_SECONDS,
        num_workers: int = NUM_WORKERS,
        memory_bytes: int = MEMORY_BYTES,
        modules: Sequence[str] = (),
    ):
        self._deadline, self._num_workers = deadline_seconds, num_workers
        # A trainer has threads and holds locks: workers start from a clean interpreter, not from a fork of it.
        self._context, self._at_start = multiprocessing.get_context("spawn"), (memory_bytes, tuple(modules))
        self._pool = self._start()

    @classmethod
    def of(cls, config: Config) -> GraderPool:
        """Return the pool that a configuration asks for."""
        settings, modules = config.reward, ["reasoning_gym"] * bool(config.data.reasoning_gym)
        return cls(settings.deadline_seconds, settings.num_workers, int(settings.memory_gib * 2**30), modules)

    def _start(self) -> ProcessPool:
        return ProcessPool(self._num_workers, initializer=_prepare, initargs=self._at_start, context=self._context)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.stop()
        self._pool.join()

    async def grade_all(self, jobs: Sequence[Job]) -> list[Grades | Failure]:
        """Grade all jobs.

        Jobs share messages. Where a message is not answered in time or its worker dies, each of its jobs is asked
        again alone, so that only the guilty one fails.

        Args:
            jobs: In any order.

        Returns:
            The grades of each job, or why there are none, in the order of the jobs. No score is invented.
        """
        results: dict[int, Grades | Failure] = {
            place: outcome for place, job in enumerate(jobs) if job.is_instant for outcome in _grade_each([job])
        }
        far = [place for place, job in enumerate(jobs) if not job.is_instant]
        size = min(_JOBS_PER_MESSAGE, max(1, len(far) // (4 * self._num_workers)))
        messages = [far[start : start + size] for start in range(0, len(far), size)]
        suspects = []
        for message, answered in zip(messages, await self._ask_all(jobs, messages), strict=True):
            if isinstance(answered, Failure) and len(message) == 1:
                results[message[0]] = answered
            elif answered is None or isinstance(answered, Failure):
                suspects += message
            else:
                results |= zip(message, answered, strict=True)
        for place, answered in zip(suspects, await self._ask_all(jobs, [[one] for one in suspects]), strict=True):
            results[place] = answered[0] if isinstance(answered, list) else answered or _POOL_BROKE
        if suspects:
            failed = sum(isinstance(results[place], Failure) for place in suspects)
            log.warning("%d answers were asked again one by one; %d of them have no grade", len(suspects), failed)
        return [results[place] for place in range(len(jobs))]

    async def _ask_all(
        self, jobs: Sequence[Job], messages: Sequence[Sequence[int]]
    ) -> list[list[Grades | Failure] | Failure | None]:
        if not messages:
            return []  # asking whether the pool is active would start its workers
        if not self._pool.active:
            self._pool.join()
            self._pool = self._start()
        # As many as the workers need next: what waits for its turn is not copied into a message yet.
        turns = asyncio.Semaphore(2 * self._num_workers)

        async def ask(message: Sequence[int]) -> list[Grades | Failure] | Failure | None:
            async with turns:
                return await self._ask([jobs[place] for place in message])

        return await asyncio.gather(*(ask(message) for message in messages))

    async def _ask(self, jobs: Sequence[Job]) -> list[Grades | Failure] | Failure | None:
        """Have one worker grade jobs, all within one deadline; None where the pool broke before it could."""
        deadline = self._deadline * max(len(job.answers) for job in jobs)
        try:
            # A function that the worker cannot import would end the worker while it receives a message, and the
            # message would be lost: it is packed here and unpacked where errors are caught.
            packed = pickle.dumps(list(jobs))
            future = asyncio.wrap_future(self._pool.schedule(_grade_packed, args=(packed,), timeout=deadline))
            # A worker that is killed just as it takes a message takes it along, and its deadline never begins.
            await asyncio.wait([future], timeout=_START_SECONDS + 3 * deadline)
            if not future.done():
                future.cancel()
                return None
            return future.result()
        except DeadlineMissed:
            return Failure("deadline", f"not graded within {deadline:g} s")
        except ProcessExpired as error:
            return Failure("crash", f"the worker died with exit code {error.exitcode}")
        except BrokenProcessPool:
            return None
        except Exception as error:
            return Failure("error", f"{type(error).__name__}: {error}")


_POOL_BROKE = Failure("crash", "the workers died twice before they could grade")


def _grade_packed(jobs: bytes) -> list[Grades | Failure]:
    return _grade_each(pickle.loads(jobs))


def _grade_each(jobs: Sequence[Job]) -> list[Grades | Failure]:
    """Grade jobs one after the other; what one of them raises is its own failure."""
    results: list[Grades | Failure] = []
    for job in jobs:
        try:
            grades = tuple(_as_plain(grade) for grade in job.grader(job.answers))
            if len(grades) != len(job.answers):
                raise ValueError(f"{len(grades)} grades for {len(job.answers)} answers")
            results.append(grades)
        except MemoryError:
            results.append(Failure("crash", "the worker had no memory left"))
        except Exception as error:
            results.append(Failure("error", f"{type(error).__name__}: {error}"))
    return results


def _as_plain(grade: Grade) -> Grade:
    """Return a grade of floats only: what else a function returns might not reach another process."""
    score = None if grade.score is None else float(grade.score)
    return Grade(score, {str(name): float(value) for name, value in grade.parts.items()})


def _prepare(memory_bytes: int, modules: Sequence[str]) -> None:
    """Limit a new worker's memory, and read what an answer should not have to wait for."""
    # A grader that hangs in C would not hear a handler in Python, and cost seconds more than the deadline.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warm_up()
    for name in modules:
        importlib.import_module(name)
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

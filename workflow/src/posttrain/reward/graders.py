"""Grades responses with a deadline each: a grader that hangs costs its own sample, not the rollout."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as DeadlineMissed
from types import TracebackType

from pebble import ProcessPool

from posttrain.reward.grade import grade

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 10.0
NUM_WORKERS = 2
# Comparing two strings cannot hang: such a grader runs where it is called, without a process in between.
INSTANT_GRADERS = ("exact_match",)


class GraderPool:
    """Worker processes that grade; one that misses the deadline is killed and replaced.

    Args:
        deadline_seconds: Per response.
        num_workers: Processes; they start with the first response that needs them.
        grade_response: (name of the grader, response, label) to a score; a function that another process can import.
    """

    def __init__(
        self,
        deadline_seconds: float = DEADLINE_SECONDS,
        num_workers: int = NUM_WORKERS,
        grade_response: Callable[[str, str, str], float] = grade,
    ):
        self._deadline, self._grade = deadline_seconds, grade_response
        # A trainer has threads and holds locks: workers start from a clean interpreter, not from a fork of it.
        self._pool = ProcessPool(num_workers, context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.stop()
        self._pool.join()

    async def grade_all(self, reward: str, responses: Sequence[str], labels: Sequence[str]) -> tuple[list[float], int]:
        """Grade every response.

        Args:
            reward: Name of the grader, `data.reward`.
            responses: Decoded texts.
            labels: One each.

        Returns:
            The scores in order, 0.0 where the deadline was missed, and how many missed it.
        """
        if reward in INSTANT_GRADERS:
            return [self._grade(reward, text, label) for text, label in zip(responses, labels, strict=True)], 0
        futures = [
            asyncio.wrap_future(self._pool.schedule(self._grade, args=(reward, text, label), timeout=self._deadline))
            for text, label in zip(responses, labels, strict=True)
        ]
        results = await asyncio.gather(*futures, return_exceptions=True)
        return self._count_missed(results)

    def _count_missed(self, results: Sequence[float | BaseException]) -> tuple[list[float], int]:
        scores, missed = [], 0
        for result in results:
            if isinstance(result, DeadlineMissed):
                missed += 1
                scores.append(0.0)
            elif isinstance(result, BaseException):
                raise RuntimeError(f"a grader failed: {result}") from result
            else:
                scores.append(result)
        if missed:
            log.warning("%d responses were not graded within %g s; they count as 0", missed, self._deadline)
        return scores, missed

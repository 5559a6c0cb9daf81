"""Grades answers in workers with a deadline each: a grader that hangs or crashes loses one answer, not the rollout."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from posttrain.config.schema import Config
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.grade import GRADERS, grade
from posttrain.rl.reward.job import Grades, Job, grade_job, reason_of
from posttrain.rl.reward.shape import ShapeSettings
from posttrain.rl.reward.worker import HEADER, READY

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 10.0
NUM_WORKERS = 2
# Memory limit beyond a worker's initial mapping, so that one answer cannot exhaust the node's memory.
MEMORY_BYTES = 1 << 30
# Starting a worker takes a second, and much longer on a busy machine.
_START_SECONDS = 180.0
# Limit on a job's result; the grades of a large group take kilobytes.
_MAX_REPLY_BYTES = 16 << 20


@dataclass(frozen=True)
class BuiltIn:
    """A built-in grader with its settings, picklable for a worker.

    Args:
        name: A key of `GRADERS`.
        settings: Settings of the format graders.
    """

    name: str
    settings: ShapeSettings
    takes_groups: ClassVar[bool] = False
    source: ClassVar[str] = ""

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


class WorkerDied(RuntimeError):
    """A worker ended before it answered; states how."""


class Worker:
    """A process of `posttrain.rl.reward.worker`, which grades one job at a time.

    Args:
        memory_bytes: Limit on memory mapped beyond that at its start.
        modules: Modules that it imports at its start.

    Raises:
        WorkerDied: It ended before it was ready.
        TimeoutError: It was not ready in time.
    """

    def __init__(self, memory_bytes: int, modules: Sequence[str]):
        self.has_graded = False
        self._channel, theirs = socket.socketpair()
        words = [theirs.fileno(), os.getpid(), memory_bytes, *modules]
        # -P: files in the working folder must not shadow modules. The worker uses this process's module path.
        command = [sys.executable, "-P", "-u", "-m", "posttrain.rl.reward.worker", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            # A reward function's prints go to the log, because standard output belongs to the command.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
            )
        try:
            if self._receive(_START_SECONDS) != READY:
                raise WorkerDied("the worker did not start")
        except BaseException:
            self.end()
            raise

    def grade(self, packed: bytes, seconds: float) -> tuple[Grades | Failure, str]:
        """Grade a job.

        Args:
            packed: The pickled job.
            seconds: Its deadline.

        Returns:
            Its grades or a failure, and the state it left in the worker: "" if another job may follow.

        Raises:
            WorkerDied: The process ended, or sent an invalid answer.
            TimeoutError: It did not answer in time.
        """
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(HEADER.pack(len(packed)) + packed)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error
        reply = self._receive(seconds)
        self.has_graded = True
        try:
            if "failure" in reply:
                return Failure(*reply["failure"]), reply["left"]
            return tuple(Grade(score, parts) for score, parts in reply["grades"]), reply["left"]
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerDied("the worker's answer cannot be read") from error

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _receive(self, seconds: float) -> Any:
        """Return the content of the next frame."""
        until = time.monotonic() + seconds
        (size,) = HEADER.unpack(self._read(HEADER.size, until))
        if size > _MAX_REPLY_BYTES:
            raise WorkerDied(f"the worker answered with {size} bytes")
        try:
            return json.loads(self._read(size, until))
        except ValueError as error:
            raise WorkerDied("the worker's answer is no JSON") from error

    def _read(self, size: int, until: float) -> bytes:
        content = b""
        while len(content) < size:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            try:
                chunk = self._channel.recv(size - len(content))
            except ConnectionResetError as error:
                raise self._died() from error
            if not chunk:
                raise self._died()
            content += chunk
        return content

    def _died(self) -> WorkerDied:
        # It may have closed its end and still be alive.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = "closed its end" if code is None else f"died with exit code {code}"
        return WorkerDied(f"the worker {how}")


class GraderPool:
    """A pool of grading workers; replaces a worker that misses a deadline or cannot take another job.

    Args:
        deadline_seconds: Per answer; a group's deadline is multiplied by its size.
        num_workers: Processes, started on demand.
        memory_bytes: Limit on memory that a worker maps beyond that at its start.
        modules: Modules imported at a worker's start, so that no answer waits for them.
    """

    def __init__(
        self,
        deadline_seconds: float = DEADLINE_SECONDS,
        num_workers: int = NUM_WORKERS,
        memory_bytes: int = MEMORY_BYTES,
        modules: Sequence[str] = (),
    ):
        self._deadline, self._num_workers = deadline_seconds, num_workers
        self._at_start = (memory_bytes, tuple(modules))
        # The kernel ends a worker with the thread that started it, so these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        # Each thread keeps its worker between jobs.
        self._own = threading.local()
        self._workers: set[Worker] = set()
        self._is_closed = False
        self._told: set[str] = set()

    @classmethod
    def of(cls, config: Config) -> GraderPool:
        """Return the pool for a configuration."""
        settings, modules = config.reward, ["reasoning_gym"] * bool(config.data.reasoning_gym)
        return cls(settings.deadline_seconds, settings.num_workers, int(settings.memory_gib * 2**30), modules)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for worker in list(self._workers):
            worker.end()
        self._threads.shutdown()

    async def grade_all(self, jobs: Sequence[Job]) -> list[Grades | Failure]:
        """Grade all jobs.

        Args:
            jobs: In any order.

        Returns:
            The grades of each job or a failure, in the order of the jobs. No score is invented.
        """
        results = {place: grade_job(job) for place, job in enumerate(jobs) if job.is_instant}
        waiting = collections.deque(place for place, job in enumerate(jobs) if not job.is_instant)

        def work() -> None:
            while waiting:
                with contextlib.suppress(IndexError):  # another thread took the last one
                    place = waiting.popleft()
                    results[place] = self._grade(jobs[place])

        loop = asyncio.get_running_loop()
        try:
            threads = range(min(self._num_workers, len(waiting)))
            await asyncio.gather(*(loop.run_in_executor(self._threads, work) for _ in threads))
        finally:
            waiting.clear()
        return [results[place] for place in range(len(jobs))]

    def _grade(self, job: Job) -> Grades | Failure:
        """Grade a job in this thread's worker.

        If a used worker dies or runs out of memory, earlier jobs may be the cause: the job is retried in a new worker,
        and fails only there.
        """
        try:
            packed = pickle.dumps(job)
        except Exception as error:
            return Failure("error", reason_of(error, job.source))
        deadline = self._deadline * len(job.answers)
        while True:
            try:
                worker = self._worker()
            except (WorkerDied, TimeoutError, OSError) as error:
                return Failure("crash", f"no worker could be started: {error or 'not in time'}")
            was_new = not worker.has_graded
            outcome = self._ask(worker, packed, deadline)
            is_crash = isinstance(outcome, Failure) and outcome.kind == "crash"
            if was_new or not is_crash or self._is_closed:
                return outcome

    def _ask(self, worker: Worker, packed: bytes, deadline: float) -> Grades | Failure:
        """Grade a job in a worker, and end the worker if no other job may follow."""
        try:
            outcome, left = worker.grade(packed, deadline)
        except TimeoutError:
            outcome, left = Failure("deadline", f"not graded within {deadline:g} s"), "late"
        except WorkerDied as error:
            outcome, left = Failure("crash", str(error)), "dead"
        if left:
            self._end(worker)
            if left not in self._told and not isinstance(outcome, Failure):
                self._told.add(left)
                log.warning("a grader left %s behind: its process is replaced, which takes a second each time", left)
        return outcome

    def _worker(self) -> Worker:
        """Return this thread's worker, starting one if necessary."""
        if self._is_closed:
            raise WorkerDied("the graders have ended")
        worker: Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = Worker(*self._at_start)
            self._workers.add(worker)
        return worker

    def _end(self, worker: Worker) -> None:
        self._own.worker = None
        self._workers.discard(worker)
        worker.end()

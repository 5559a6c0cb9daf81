"""Sources of a step's trajectories."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from posttrain.report.rank_progress import (
    ROLLOUT,
    SHARE_ROLLOUT,
    keep_reporting,
    report_progress,
    report_unresponsive_engine,
)
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop
from posttrain.rl.rollout.broadcast import as_plain, from_plain
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import RolloutResult

log = logging.getLogger(__name__)

T = TypeVar("T")
# Most recoveries in one step: an engine that a request itself crashes would fail forever.
MOST_RECOVERIES = 3


class RolloutSource(Protocol):
    """Supplies the training loop with trajectories; every rank has one and makes the same calls."""

    def wait_ready(self, step: int | None = None) -> None:
        """Wait until samples can be requested; during a step (from 0), if engines restart."""

    def begin(self, finished: int) -> None:
        """Start after `finished` steps, whose weights the engines have."""

    def publishing(self, version: int) -> AbstractContextManager[bool]:
        """Let engines get new weights during the block; gives whether requests run meanwhile."""

    def collect(self, step: int, recover: Callable[[str], None]) -> RolloutResult:
        """Return the rollout of a step, the same on every rank.

        Args:
            step: From 0.
            recover: Called on every rank with the failure, to replace a failed engine.

        Raises:
            EngineError: Recovery did not help.
        """


class RolloutMaker(Protocol):
    """Makes the rollout of a step, on rank 0."""

    async def collect(self, step: int) -> RolloutResult:
        """Return the groups of a step, from 0."""


class SharedSource:
    """Rollouts that rank 0 makes and shares with all ranks, from engines or from offline responses.

    Args:
        runner: Event loop for everything that talks to engines.
        share: Broadcasts JSON types from rank 0 to all ranks; None with a single rank.
        start_timeout_seconds: Engines must be ready within this.
        client: The engines, on rank 0; None elsewhere and without engines.
        maker: Makes rollouts, on rank 0; None elsewhere.
    """

    def __init__(
        self,
        runner: EventLoop,
        share: Callable[[Any], Any] | None,
        start_timeout_seconds: float,
        client: EngineClient | None,
        maker: RolloutMaker | None,
    ):
        self._runner, self._share, self._start_timeout_seconds = runner, share, start_timeout_seconds
        self._client, self._maker = client, maker

    def begin(self, finished: int) -> None:
        """See `RolloutSource`."""

    @contextmanager
    def publishing(self, version: int) -> Iterator[bool]:
        """See `RolloutSource`. No request runs while the trainer does."""
        yield False

    def wait_ready(self, step: int | None = None) -> None:
        """Wait until engines answer; they load while the trainer does."""
        if self._client:
            started, tell = time.perf_counter(), None if step is None else report_unresponsive_engine
            ready = self._client.wait_ready(self._start_timeout_seconds, tell_silent=tell)
            self._runner.run(ready if step is None else _alive(ready, step))
            log.info("the trainer has its weights; engines were ready %.1f s later", time.perf_counter() - started)

    def collect(self, step: int, recover: Callable[[str], None]) -> RolloutResult:
        """See `RolloutSource`. Groups that are already on disk are not requested again."""
        for num_recovered in itertools.count():
            rollout, failure = self._try(step)
            if not failure:
                assert rollout is not None
                return rollout
            if num_recovered == MOST_RECOVERIES:
                raise EngineError(f"{failure}; engines failed {num_recovered + 1} times in step {step + 1}")
            recover(failure)
        raise AssertionError("unreachable")

    def _try(self, step: int) -> tuple[RolloutResult | None, str]:
        """Return the rollout, or the engine failure, the same on every rank."""
        rollout, failure = None, ""
        try:
            rollout = self._make(self._maker, step) if self._maker else None
        except EngineError as error:
            failure = str(error)
        if rollout:
            report_progress(step, SHARE_ROLLOUT)
        if self._share:
            content, failure = self._share([rollout and as_plain(rollout), failure])
            rollout = rollout or (from_plain(content) if content else None)
        return rollout, failure

    def _make(self, maker: RolloutMaker, step: int) -> RolloutResult:
        """Return the rollout of a step, on rank 0.

        It is not returned through the runner: at its end `Runner.run` restores the handler of SIGINT, for which Python
        formats the finished task with its whole result, all tokens of a step.
        """
        made = list[RolloutResult]()

        async def make() -> None:
            made.append(await _alive(maker.collect(step), step))

        self._runner.run(make())
        return made[0]


class QueueSource(SharedSource):
    """Rollouts from a queue of groups, which engines may fill while the trainer trains.

    Args:
        runner: Runs in a separate thread.
        share: See `SharedSource`.
        start_timeout_seconds: See `SharedSource`.
        client: See `SharedSource`.
        generator: Fills the queue, on rank 0; None elsewhere.
        runs_ahead: Requests run while the trainer trains.
    """

    def __init__(
        self,
        runner: EventLoop,
        share: Callable[[Any], Any] | None,
        start_timeout_seconds: float,
        client: EngineClient | None,
        generator: TrajectoryGenerator | None,
        runs_ahead: bool,
    ):
        super().__init__(runner, share, start_timeout_seconds, client, generator)
        self._generator, self._runs_ahead, self._has_begun = generator, runs_ahead, False

    def begin(self, finished: int) -> None:
        """See `RolloutSource`."""
        self._has_begun = True
        if self._generator:
            self._runner.run(self._generator.begin(finished))

    @contextmanager
    def publishing(self, version: int) -> Iterator[bool]:
        """See `RolloutSource`. If the block raises, the engines stay paused: their weights are unknown."""
        if not self._has_begun:
            yield False
            return
        if self._generator and self._runs_ahead:
            self._runner.run(self._generator.pause())
        yield self._runs_ahead
        if self._generator:
            self._runner.run(self._generator.resume(version))


class StoredSource:
    """Replays rollouts from disk without engines; every rank reads all of them.

    Args:
        store: The stored rollouts.
        num_groups: Groups per step.
    """

    def __init__(self, store: RolloutStore, num_groups: int):
        self._store, self._num_groups = store, num_groups

    def wait_ready(self, step: int | None = None) -> None:
        """Return at once."""

    def begin(self, finished: int) -> None:
        """See `RolloutSource`."""

    @contextmanager
    def publishing(self, version: int) -> Iterator[bool]:
        """See `RolloutSource`."""
        yield False

    def collect(self, step: int, recover: Callable[[str], None]) -> RolloutResult:
        """See `RolloutSource`.

        Raises:
            CheckpointError: The step has no complete rollout.
        """
        groups = self._store.read_step(step, self._num_groups)
        return RolloutResult(groups, num_replayed=len(groups))


async def _alive(work: Coroutine[Any, Any, T], step: int) -> T:
    """Run an engine operation while reporting that this rank is alive."""
    alive = asyncio.create_task(keep_reporting(step, ROLLOUT))
    try:
        return await work
    finally:
        alive.cancel()

"""Where the trainer gets the samples of a step from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from posttrain.engines.client import EngineClient
from posttrain.observability.rank_progress import ROLLOUT, SHARE_ROLLOUT, keep_reporting, report_progress
from posttrain.rollout.coordinator import RolloutResult
from posttrain.rollout.persisted import RolloutStore
from posttrain.rollout.sharing import as_plain, from_plain

log = logging.getLogger(__name__)


class RolloutSource(Protocol):
    """What the loop asks for samples; every rank has one and calls it at the same points."""

    def wait_ready(self) -> None:
        """Return when samples can be had."""

    def collect(self, step: int) -> RolloutResult:
        """Return the rollout of a step, from 0, the same on every rank."""


class RolloutMaker(Protocol):
    """What makes the rollout of a step, on rank 0."""

    async def collect(self, step: int) -> RolloutResult:
        """Return the groups of a step, from 0."""


class SynchronousSource:
    """Samples made while the trainer waits: of exactly the present weights, by engines, or given ones.

    Args:
        runner: Event loop for everything that talks to engines.
        share: Hands JSON types from rank 0 to all ranks; None where there is one.
        start_timeout_seconds: Engines must be ready within this.
        client: The engines, on rank 0; None elsewhere, and where there are none.
        maker: Makes rollouts, on rank 0; None elsewhere.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        share: Callable[[Any], Any] | None,
        start_timeout_seconds: float,
        client: EngineClient | None,
        maker: RolloutMaker | None,
    ):
        self._runner, self._share, self._start_timeout_seconds = runner, share, start_timeout_seconds
        self._client, self._maker = client, maker

    def wait_ready(self) -> None:
        """Return when engines answer: they have been loading while the trainer did."""
        if self._client:
            started = time.perf_counter()
            self._runner.run(self._client.wait_ready(self._start_timeout_seconds))
            log.info("the trainer has its weights; engines were ready %.1f s later", time.perf_counter() - started)

    def collect(self, step: int) -> RolloutResult:
        """See `RolloutSource`."""
        rollout = self._runner.run(_collect(self._maker, step)) if self._maker else None
        if rollout:
            report_progress(step, SHARE_ROLLOUT)
        if self._share:
            shared = self._share(rollout and as_plain(rollout))
            rollout = rollout or from_plain(shared)
        assert rollout is not None
        return rollout


class StoredSource:
    """Rollouts that are on disk, of which every rank reads all: no engine is asked.

    Args:
        store: Where they are.
        num_groups: Of a step.
    """

    def __init__(self, store: RolloutStore, num_groups: int):
        self._store, self._num_groups = store, num_groups

    def wait_ready(self) -> None:
        """Return at once."""

    def collect(self, step: int) -> RolloutResult:
        """See `RolloutSource`.

        Raises:
            CheckpointError: The step has no whole rollout.
        """
        groups = self._store.read_step(step, self._num_groups)
        return RolloutResult(groups, num_replayed=len(groups))


async def _collect(maker: RolloutMaker, step: int) -> RolloutResult:
    alive = asyncio.create_task(keep_reporting(step, ROLLOUT))
    try:
        return await maker.collect(step)
    finally:
        alive.cancel()

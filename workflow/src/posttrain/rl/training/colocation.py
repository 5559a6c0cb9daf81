"""Colocation: trainer and engines share GPUs and offload in turn, by the table of `plan.sizing.phases`.

    engines ready -> engines release all memory -> the trainer loads
    -> weight_sync    the optimizer is offloaded, engines allocate weight memory and receive weights
    -> rollout        the trainer is offloaded, engines allocate their KV cache
    -> save           engines release all memory; the checkpoint is written from host memory
    -> old_logprobs, mismatch -> train   the trainer is loaded back, then its optimizer
    -> weight_sync ...

Each transition completes all offloads on all nodes before it wakes anything. Sleeping engines drop their weights, so a
rollout can follow training only through `weight_sync`; `Colocation.enter` refuses any other order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from posttrain.plan.sizing.phases import (
    ENGINE_CACHE,
    ENGINE_WEIGHTS,
    LIKE_OTHERS,
    OPTIMIZER,
    PHASES,
    TRAINER,
    Phase,
)
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop
from posttrain.rl.megatron_backend.plain_data import gather_plain

log = logging.getLogger(__name__)
ENGINE = frozenset((ENGINE_WEIGHTS, ENGINE_CACHE))


class Sleeper(Protocol):
    """One side of a colocation: offloads and reloads its own parts and ignores the other side's."""

    def sleep(self, parts: Iterable[str]) -> None:
        """Offload parts that are awake."""

    def wake(self, parts: Iterable[str]) -> None:
        """Reload parts that are asleep."""


class SleepingEngines:
    """Puts all engines to sleep and wakes them; does nothing on ranks other than 0.

    Args:
        client: The engines, on rank 0; None elsewhere.
        runner: Event loop of rank 0.
        start_timeout_seconds: Engines must be ready within this.
    """

    def __init__(self, client: EngineClient | None, runner: EventLoop, start_timeout_seconds: float):
        self._client, self._runner = client, runner
        self._start_timeout_seconds = start_timeout_seconds

    def start(self) -> None:
        """Wait until all engines are ready, then have them release all memory; collective.

        An engine sizes its KV cache by the memory that is free at its start, so the trainer must not hold any yet.
        """
        if self._client:
            self._runner.run(self._client.wait_ready(self._start_timeout_seconds))
            log.info("engines are ready, and sleep while the trainer loads")
        self.sleep(ENGINE)
        wait_for_all()

    def sleep(self, parts: Iterable[str]) -> None:
        """Have idle engines release parts."""
        if self._client and (parts := ENGINE & {*parts}):
            self._runner.run(self._client.release_memory(parts))

    def wake(self, parts: Iterable[str]) -> None:
        """Have engines allocate parts again."""
        if self._client and (parts := ENGINE & {*parts}):
            self._runner.run(self._client.resume_memory(parts))


class Colocation:
    """Tracks which side is awake and which phases may follow; every rank calls it at the same points.

    Args:
        trainer: All its parts are awake.
        engines: All their parts are asleep.
        wait: Returns when all ranks have called it.
    """

    def __init__(self, trainer: Sleeper, engines: Sleeper, wait: Callable[[], None]):
        self._sleepers, self._wait = (trainer, engines), wait
        self._awake = frozenset((TRAINER, OPTIMIZER))
        self._engines_have_weights = False

    @property
    def awake(self) -> frozenset[str]:
        """Parts that are awake."""
        return self._awake

    @property
    def next(self) -> Mapping[str, Callable[[], None]]:
        """Allowed next phases, and how to enter each; collective.

        A rollout is not allowed while engines lack weights: they would sample noise.
        """
        possible = {
            name: PHASES[LIKE_OTHERS.get(name, name)]
            for name in (*PHASES, *LIKE_OTHERS)
            if self._engines_have_weights or ENGINE_CACHE not in PHASES[LIKE_OTHERS.get(name, name)].awake
        }
        return {name: partial(self._enter, phase) for name, phase in possible.items()}

    def enter(self, phase: str) -> None:
        """Enter a phase.

        Raises:
            RuntimeError: The phase may not come next.
        """
        following = self.next
        if phase not in following:
            raise RuntimeError(f"engines have no weights for {phase}; what may come next: {', '.join(following)}")
        following[phase]()

    def have_published(self) -> None:
        """Allow a rollout: engines have received the weights."""
        assert ENGINE_WEIGHTS in self._awake, "only awake engines get weights"
        self._engines_have_weights = True

    def _enter(self, phase: Phase) -> None:
        tired, rested = self._awake - phase.awake, phase.awake - self._awake
        if ENGINE_WEIGHTS in tired:
            self._engines_have_weights = False
        for sleeper in self._sleepers:
            sleeper.sleep(tired)
        if tired:
            self._wait()
        for sleeper in self._sleepers:
            sleeper.wake(rested)
        self._awake = phase.awake


def wait_for_all() -> None:
    """Barrier over all ranks that keeps no GPU busy."""
    gather_plain(None)

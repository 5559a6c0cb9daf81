"""Training with engines that run ahead, on a virtual clock: the run's own queue, without requests, files or weights.

The trainer takes a step's groups as soon as `TrajectoryQueue` hands them over, trains for a fixed time, and gives the
engines new weights, which takes a fixed time in which both stand still. All running requests share the engines evenly:
a token of each takes a time that depends on their number and their mean context. What `rollout.on_new_weights` does:

    recompute, abort   decoding continues after all running requests have been prefilled again
    keep               decoding continues at once
    finish             engines get new weights when the last running request has ended; none starts meanwhile

With `rollout.tail_fraction` trainer and engines take turns: the engines pause while the trainer works and during the
transfer, and then prefill the unfinished responses again.

Engines that prefill for themselves decode nothing meanwhile. Where others prefill, only the new requests wait; after
new weights all do. Not modelled: grading, and requests that are spread unevenly over the engines.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from posttrain.trajectory_queue import TrajectoryQueue, groups_of_tail

PREFILLS_AGAIN = ("recompute", "abort")


@dataclass(frozen=True)
class SharedEngines:
    """All engines of a run.

    Args:
        token_seconds: (running requests of all engines, their mean context in tokens) -> time of a token of each.
        prefill_seconds: (requests, tokens of each) -> time in which all of them are prefilled.
        max_running: Requests that all engines together run at once.
        prefills_apart: Other engines prefill, while these decode.
    """

    token_seconds: Callable[[float, float], float]
    prefill_seconds: Callable[[float, float], float]
    max_running: int
    prefills_apart: bool = False


@dataclass(frozen=True)
class AsyncSteps:
    """What a step does.

    Args:
        batch_size: Groups of a step.
        group_size: Requests of a group.
        max_staleness: The bound, in updates.
        train_seconds: Log-probabilities and training of a step.
        sync_seconds: Transfer of new weights.
        prompt_tokens: Tokens of a prompt.
        on_new_weights: `rollout.on_new_weights`.
        tail_fraction: `rollout.tail_fraction`: engines stand still while the trainer works; 0: they run ahead.
    """

    batch_size: int
    group_size: int
    max_staleness: int
    train_seconds: float
    sync_seconds: float = 0.0
    prompt_tokens: float = 0.0
    on_new_weights: str = "recompute"
    tail_fraction: float = 0.0

    @property
    def num_ahead(self) -> int | None:
        """Groups started beyond those of the next step; None: what `max_staleness` allows."""
        return groups_of_tail(self.tail_fraction, self.batch_size) if self.tail_fraction else None


@dataclass(frozen=True)
class SimulatedSteps:
    """Means over the simulated steps.

    Args:
        step_seconds: From one step's groups to the next one's.
        trainer_idle: Share of the time in which the trainer waits for groups.
        num_running: Requests that run.
        staleness: Age of a trained token in updates.
        pause_seconds: Time per update in which engines stand still for new weights, the transfer apart.
    """

    step_seconds: float
    trainer_idle: float
    num_running: float
    staleness: float
    pause_seconds: float


def simulate(
    steps: AsyncSteps, engines: SharedEngines, lengths: Iterator[float], num_steps: int, warm_up: int | None = None
) -> SimulatedSteps:
    """Return what steps take in the long run.

    Args:
        steps: What a step does.
        engines: The engines.
        lengths: Tokens of one response after another.
        num_steps: Steps to average over.
        warm_up: Steps before these; by default until the queue is full.
    """
    first = steps.max_staleness + 2 if warm_up is None else warm_up
    run = _Run(steps, engines, lengths, first + num_steps)
    run.until(first)
    before = run.totals
    run.until(first + num_steps)
    spent = [after - start for after, start in zip(run.totals, before, strict=True)]
    clock, waited, decoded, tokens, aged, paused = spent
    return SimulatedSteps(
        step_seconds=clock / num_steps,
        trainer_idle=waited / clock,
        num_running=decoded / clock,
        staleness=aged / tokens,
        pause_seconds=paused / num_steps,
    )


@dataclass
class _Group:
    """A group that runs or waits.

    Args:
        version: The weights it was started with.
        num_running: Its requests that have not ended.
        tokens: Of those that have ended.
        version_sum: The weight version of each of these tokens, added up.
    """

    version: int
    num_running: int
    tokens: float = 0.0
    version_sum: float = 0.0


class _Run:
    """The state of a run.

    `progress` counts the tokens that each running request gets: one that starts at a progress of p with n tokens ends
    at p + n, whatever the others do.
    """

    def __init__(self, steps: AsyncSteps, engines: SharedEngines, lengths: Iterator[float], num_steps: int):
        self._steps, self._engines, self._lengths = steps, engines, lengths
        # No step of the simulation is the run's last, for which no engine would run ahead.
        last = num_steps + steps.max_staleness + 1
        self._queue = TrajectoryQueue(steps.batch_size, steps.max_staleness, last, num_ahead=steps.num_ahead)
        self._clock = self._progress = 0.0
        self._step = 0
        self._groups: dict[int, _Group] = {}
        self._running: list[tuple[float, float, int]] = []  # progress at the end, and at the start; position
        self._start_sum = 0.0
        self._num_responses = 0  # that run, or are prefilled
        self._prefilling: deque[tuple[float, int]] = deque()  # when it ends; position
        self._still_until = self._prefill_free = 0.0
        self._updates_at: list[float] = []  # progress at each update
        self._phase, self._phase_ends = "wait", math.inf
        self._queue_changed = True
        self._waited = self._decoded = self._tokens = self._aged = self._paused = 0.0

    @property
    def totals(self) -> tuple[float, ...]:
        """Clock, trainer's waiting, seconds of all requests, tokens trained on, their ages, engines' pauses."""
        return self._clock, self._waited, self._decoded, self._tokens, self._aged, self._paused

    def until(self, step: int) -> None:
        """Run until a step has got its groups."""
        while self._step < step or self._phase != "train":
            if self._queue_changed:
                self._queue_changed = False
                self._start_groups()
                if self._phase == "wait" and (chosen := self._queue.choose(self._step)) is not None:
                    self._take(chosen)
            else:
                self._advance()

    def _take(self, positions: list[int]) -> None:
        self._queue.take(self._step, positions)
        self._queue_changed = True
        for group in map(self._groups.pop, positions):
            self._tokens += group.tokens
            self._aged += self._step * group.tokens - group.version_sum
        self._phase, self._phase_ends = "train", self._clock + self._steps.train_seconds
        if self._steps.tail_fraction:
            self._still_until = max(self._still_until, self._phase_ends)

    def _start_groups(self) -> None:
        """Start the groups that the queue allows and engines have places for, as `TrajectoryGenerator` does."""
        if self._phase in ("drain", "sync"):
            return
        size, queue = self._steps.group_size, self._queue
        most = max(size, self._engines.max_running)
        while self._num_responses + size <= most and (position := queue.start()) is not None:
            self._num_responses += size
            self._groups[position] = _Group(queue.version, size)
            seconds = self._engines.prefill_seconds(size, self._steps.prompt_tokens)
            if self._engines.prefills_apart:
                self._prefill_free = max(self._clock, self._prefill_free) + seconds
                self._prefilling.append((self._prefill_free, position))
            else:
                self._still_until = max(self._clock, self._still_until) + seconds
                self._decode(position)

    def _decode(self, position: int) -> None:
        """Let a group's requests run."""
        for _ in range(self._steps.group_size):
            heapq.heappush(self._running, (self._progress + next(self._lengths), self._progress, position))
        self._start_sum += self._steps.group_size * self._progress

    def _advance(self) -> None:
        """Go to the next event."""
        ends = min(self._phase_ends, self._prefilling[0][0] if self._prefilling else math.inf)
        decodes_from, ended = max(self._clock, self._still_until), False
        if running := len(self._running):
            left = self._running[0][0] - self._progress
            context = self._steps.prompt_tokens + self._progress - self._start_sum / running + left / 2
            seconds = self._engines.token_seconds(running, context)
            if ended := decodes_from + left * seconds <= ends:
                ends, self._progress = decodes_from + left * seconds, self._running[0][0]
            else:
                self._progress += max(ends - decodes_from, 0.0) / seconds
            self._decoded += running * max(ends - decodes_from, 0.0)
        self._waited += (ends - self._clock) * (self._phase in ("wait", "drain"))
        self._paused += (ends - self._clock) * (self._phase == "drain")
        self._clock = ends
        if ended:
            self._end_request()
        elif ends == self._phase_ends:
            self._end_phase()
        else:
            self._decode(self._prefilling.popleft()[1])

    def _end_request(self) -> None:
        end, start, position = heapq.heappop(self._running)
        self._start_sum -= start
        self._num_responses -= 1
        group = self._groups[position]
        group.num_running -= 1
        group.tokens += end - start
        # Of its tokens those after each update have one version more.
        group.version_sum += (self._queue.version * (end - start)) - sum(
            updated - start for updated in self._updates_at[bisect_left(self._updates_at, start) :]
        )
        if not group.num_running:
            self._queue.add_ready(position, group.version)
            self._queue_changed = True
        else:
            self._start_groups()
        if self._phase == "drain" and not (self._running or self._prefilling):
            self._begin_sync()

    def _end_phase(self) -> None:
        if self._phase == "sync":
            self._get_new_weights()
        elif self._steps.on_new_weights == "finish" and (self._running or self._prefilling):
            self._phase, self._phase_ends = "drain", math.inf
        else:
            self._begin_sync()

    def _begin_sync(self) -> None:
        self._phase, self._phase_ends = "sync", self._clock + self._steps.sync_seconds
        self._still_until = max(self._still_until, self._clock) + self._steps.sync_seconds

    def _get_new_weights(self) -> None:
        self._step += 1
        self._queue.version = self._step
        self._queue_changed = True
        self._updates_at.append(self._progress)
        self._phase, self._phase_ends = "wait", math.inf
        if (running := len(self._running)) and self._steps.on_new_weights in PREFILLS_AGAIN:
            context = self._steps.prompt_tokens + self._progress - self._start_sum / running
            seconds = self._engines.prefill_seconds(running, context)
            self._still_until += seconds
            self._paused += seconds

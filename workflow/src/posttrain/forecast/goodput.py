"""What share of a run's wall time ends in kept steps: failures simulated as a Poisson process.

Letters: k steps between checkpoints; s seconds of a new step, r of one whose rollout is on disk (r = s where nothing is
replayed); c seconds of a save, h of them hidden behind the next step's rollout; R seconds of a restart.

A run goes from failure to failure. After each comes a restart, which may itself be interrupted. Then the steps since
the last checkpoint are done again, in r seconds where their rollout is on disk, and the run goes on: k steps, a save, k
steps, a save. A save begins with the rollout of the step after it and counts c seconds later: a failure before that has
the k steps done again. The step waits for the save, c - h seconds. A rollout that was interrupted is counted as lost
whole; its finished groups are in truth kept, but most groups end late, with their longest sample.

    share = s x (steps of committed checkpoints) / wall time

The time between two failures is exponential, so the state after a failure is all that the next one needs: the number of
rollouts on disk since the checkpoint, and how long each spare node is still to be waited for. Between two failures
everything has a closed form, for all runs of all scenarios at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# 12,288 failures of each scenario: a share's standard error is about 0.2 %, which the tests' tolerance is made for.
NUM_RUNS, NUM_FAILURES = 192, 64


@dataclass(frozen=True)
class RestartSeconds:
    """From a failure to the first step after it.

    Args:
        in_place: On the same nodes, inside the allocation.
        on_spare: Inside the allocation, a spare node in the place of a lost one.
        requeued: In a new allocation, waiting for it included.
    """

    in_place: float
    on_spare: float
    requeued: float


@dataclass(frozen=True)
class Scenario:
    """What a simulation needs to know of a run; times in seconds.

    Args:
        step: A new step, without saves.
        redone_step: A step after a failure, where it had been done before.
        save: One checkpoint.
        hidden_save: Part of it that passes beside the next step's rollout, at most as long as that.
        save_interval: Steps between checkpoints.
        failures_per_second: Of all nodes together.
        node_loss_share: Share of the failures that take a node away.
        spares: Spare nodes of an allocation; when none is there, the next loss is requeued, and they are there again.
        refill: From the use of a spare node until another is there; infinite where nobody sends one.
        restart: How long restarts take.
    """

    step: float
    redone_step: float
    save: float
    hidden_save: float
    save_interval: int
    failures_per_second: float
    node_loss_share: float
    spares: int
    refill: float
    restart: RestartSeconds


def effective_shares(scenarios: Sequence[Scenario], seed: int = 0) -> list[float]:
    """Return the share of wall time that ends in kept steps, of each scenario.

    All scenarios meet the same failures, scaled by their rates: differences between them are not chance.

    Args:
        scenarios: What to simulate, each with a positive rate of failures; some dozens, so that their arrays stay in a
            processor's cache.
        seed: Of the failures.
    """
    random = np.random.default_rng(seed)
    waits = random.exponential(size=(NUM_FAILURES, 1, NUM_RUNS))
    luck = random.random(size=(NUM_FAILURES, 1, NUM_RUNS))
    runs = _Runs(scenarios)
    for wait, draw in zip(waits, luck, strict=True):
        runs.meet_failure(wait, draw)
    return runs.shares()


def best_of(intervals: Sequence[int], shares: Sequence[float]) -> tuple[int, float]:
    """Return the save interval with the largest share, and the share; of equal ones the longest, which writes least."""
    share, interval = max(zip(shares, intervals, strict=True))
    return interval, share


def with_intervals(scenario: Scenario, intervals: Sequence[int]) -> list[Scenario]:
    """Return the scenario with each save interval."""
    return [dataclasses.replace(scenario, save_interval=interval) for interval in intervals]


class _Runs:
    """The state of NUM_RUNS runs of each scenario: arrays [scenario, run]."""

    def __init__(self, scenarios: Sequence[Scenario]):
        self._step, self._redone = _column(scenarios, "step"), _column(scenarios, "redone_step")
        self._save, self._interval = _column(scenarios, "save"), _column(scenarios, "save_interval")
        self._hidden_save, self._rate = _column(scenarios, "hidden_save"), _column(scenarios, "failures_per_second")
        self._refill, spares = _column(scenarios, "refill"), _column(scenarios, "spares")
        self._node_loss_share = _column(scenarios, "node_loss_share")
        restarts = [scenario.restart for scenario in scenarios]
        self._in_place, self._on_spare = _column(restarts, "in_place"), _column(restarts, "on_spare")
        self._requeued = _column(restarts, "requeued")
        shape = (len(scenarios), NUM_RUNS)
        # Seconds until each spare node is there [place, scenario, run]; one that there is not never comes.
        places = np.arange(max(1, int(spares.max())))[:, None, None]
        self._all_there = np.where(places < spares, 0.0, np.inf)
        self._until_there = np.broadcast_to(self._all_there, (len(places), *shape)).copy()
        self._rolled_out, self._kept_steps, self._wall = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def meet_failure(self, wait: Array, draw: Array) -> None:
        """Let each run restart and train until its next failure.

        Args:
            wait: Time until then, in mean times between failures.
            draw: Uniform in [0, 1): decides what the failure before took away.
        """
        seconds = wait / self._rate
        self._wall += seconds
        trained = seconds - self._restart(draw)
        self._until_there = np.maximum(self._until_there - seconds, 0.0)
        redone = np.minimum(self._rolled_out, self._interval)
        until_saved = redone * self._redone + (self._interval - redone) * self._step + self._save
        is_saved = trained >= until_saved
        cycle = self._interval * self._step + self._save - self._hidden_save
        later = np.where(is_saved, trained - until_saved, 0.0)
        cycles = np.floor(later / cycle)
        self._kept_steps += np.where(is_saved, (1 + cycles) * self._interval, 0.0)
        # Of the steps since the last checkpoint, those that were there when this attempt began come first. When a
        # checkpoint begins to count, the next rollout has been going on for as long as hides the save.
        new = np.where(is_saved, later - cycles * cycle + self._hidden_save, trained - redone * self._redone)
        before = np.where(is_saved, 0.0, self._rolled_out)
        # The rollout beside a save may end before the save does.
        most = self._interval + (self._hidden_save > 0)
        self._rolled_out = np.minimum(before + self._rollouts_in(np.maximum(new, 0.0)), most)

    def shares(self) -> list[float]:
        """Return the share of each scenario, all its runs together."""
        kept = self._kept_steps.sum(axis=1) * self._step[:, 0]
        return [float(share) for share in kept / self._wall.sum(axis=1)]

    def _restart(self, draw: Array) -> Array:
        loses_node = draw < self._node_loss_share
        has_spare = np.zeros(loses_node.shape, dtype=bool)
        for place in self._until_there:
            takes = loses_node & ~has_spare & (place == 0.0)
            np.copyto(place, self._refill, where=takes)
            has_spare |= takes
        without = loses_node & ~has_spare
        np.copyto(self._until_there, self._all_there, where=without)
        return np.where(has_spare, self._on_spare, np.where(without, self._requeued, self._in_place))

    def _rollouts_in(self, seconds: Array) -> Array:
        """Return how many rollouts of new steps end in so many seconds: a step begins with its rollout."""
        whole = np.floor(seconds / self._step)
        return whole + (seconds - whole * self._step >= self._step - self._redone)


def _column(rows: Sequence[object], name: str) -> Array:
    return np.array([[getattr(row, name)] for row in rows], dtype=np.float64)

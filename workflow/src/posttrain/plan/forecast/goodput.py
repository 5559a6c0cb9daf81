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
    """A run as the simulation sees it; times in seconds.

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


def effective_shares(scenario: Scenario, intervals: Sequence[int], seed: int = 0) -> list[float]:
    """Return the share of wall time that ends in kept steps, with each of some save intervals.

    Scenarios of the same seed meet the same failures, scaled by their rates: differences are not chance.

    Args:
        scenario: What to simulate, with a positive rate of failures; its own interval does not matter.
        intervals: Steps between checkpoints.
        seed: Of the failures.
    """
    random, shape = np.random.default_rng(seed), (NUM_FAILURES, NUM_RUNS)
    seconds = random.exponential(size=shape) / scenario.failures_per_second
    trained = seconds - _restarts(scenario, seconds, random.random(size=shape))
    kept = _kept_steps(scenario, np.array(intervals, dtype=np.float64)[:, None], trained)
    return [float(share) for share in kept * scenario.step / seconds.sum()]


def best_of(intervals: Sequence[int], shares: Sequence[float]) -> tuple[int, float]:
    """Return the save interval with the largest share, and the share; of equal ones the longest, which writes least."""
    share, interval = max(zip(shares, intervals, strict=True))
    return interval, share


def _restarts(scenario: Scenario, seconds: Array, draws: Array) -> Array:
    """Return how long each run restarts before it trains until its next failure [failure, run].

    Args:
        scenario: What is simulated.
        seconds: From each failure to the next [failure, run].
        draws: Uniform in [0, 1): decide what a failure takes away [failure, run].
    """
    runs, places = np.arange(seconds.shape[1]), np.arange(max(1, scenario.spares))[:, None]
    # Seconds until each spare node is there [place, run]; one that there is not never comes.
    all_there = np.where(places < scenario.spares, 0.0, np.inf)
    until_there = np.repeat(all_there, len(runs), axis=1)
    restarts = np.full(seconds.shape, scenario.restart.in_place)
    for restart, until_next, loses_node in zip(restarts, seconds, draws < scenario.node_loss_share, strict=True):
        place = until_there.argmin(axis=0)
        is_there = until_there[place, runs] == 0.0
        takes, is_requeued = loses_node & is_there, loses_node & ~is_there
        until_there[place[takes], runs[takes]] = scenario.refill
        until_there[:, is_requeued] = all_there
        restart[takes], restart[is_requeued] = scenario.restart.on_spare, scenario.restart.requeued
        np.maximum(until_there - until_next, 0.0, out=until_there)
    return restarts


def _kept_steps(scenario: Scenario, interval: Array, trained: Array) -> Array:
    """Return the steps of committed checkpoints with each save interval, of all runs together.

    Args:
        scenario: What is simulated.
        interval: Steps between checkpoints [interval, 1].
        trained: Seconds between a restart's end and the next failure; negative where it is interrupted [failure, run].
    """
    until_new_saved = interval * scenario.step + scenario.save
    cycle = until_new_saved - scenario.hidden_save
    # The rollout beside a save may end before the save does.
    most = interval + (scenario.hidden_save > 0)
    rolled_out = saves = np.zeros((len(interval), trained.shape[1]))
    for seconds in trained:
        redone = np.minimum(rolled_out, interval)
        later = seconds - (until_new_saved - redone * (scenario.step - scenario.redone_step))
        is_saved = later >= 0.0
        cycles = np.floor(later / cycle)
        saves = saves + np.where(is_saved, 1 + cycles, 0.0)
        # Of the steps since the last checkpoint, those that were there when this attempt began come first. When a
        # checkpoint begins to count, the next rollout has been going on for as long as hides the save.
        since_saved = later - cycles * cycle + scenario.hidden_save
        new = np.where(is_saved, since_saved, seconds - redone * scenario.redone_step)
        before = np.where(is_saved, 0.0, rolled_out)
        rolled_out = np.minimum(before + _rollouts_in(scenario, np.maximum(new, 0.0)), most)
    return saves.sum(axis=1) * interval[:, 0]


def _rollouts_in(scenario: Scenario, seconds: Array) -> Array:
    """Return how many rollouts of new steps end in so many seconds: a step begins with its rollout."""
    whole = np.floor(seconds / scenario.step)
    return whole + (seconds - whole * scenario.step >= scenario.step - scenario.redone_step)

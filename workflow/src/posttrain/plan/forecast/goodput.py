"""Effective training time, the share of wall time spent on kept steps, with failures simulated as a Poisson process.

Letters: k steps between checkpoints; s seconds of a new step, r of one whose rollout is on disk (r = s without replay);
c seconds of a save, h of them hidden behind the next step's rollout; R seconds of a restart.

A run is a sequence of intervals between failures. A failure is followed by a restart, which may itself be interrupted.
Then the steps since the last checkpoint are repeated, in r seconds each if their rollout is on disk, and the run
continues: k steps, a save, k steps, a save. A save starts with the rollout of the next step and is committed c seconds
later: an earlier failure repeats the k steps. The step waits for the save for c - h seconds. An interrupted rollout
counts as lost; its finished groups are kept in reality, but most groups end late, with their longest sample.

    share = s x (steps of committed checkpoints) / wall time

The time between failures is exponential, so the state after a failure is sufficient for the next interval: the number
of rollouts on disk since the checkpoint, and the remaining wait for each spare node. Within an interval all quantities
have closed forms, computed for all runs of all scenarios at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# 12,288 failures per scenario: the share's standard error is about 0.2 %, which the tests' tolerance assumes.
NUM_RUNS, NUM_FAILURES = 192, 64


@dataclass(frozen=True)
class RestartSeconds:
    """Time from a failure to the first step after it.

    Args:
        in_place: On the same nodes, inside the allocation.
        on_spare: Inside the allocation, with a spare node replacing a lost one.
        requeued: In a new allocation, including the wait for it.
    """

    in_place: float
    on_spare: float
    requeued: float


@dataclass(frozen=True)
class Scenario:
    """A simulated run; times in seconds.

    Args:
        step: A new step, without saves.
        redone_step: A repeated step after a failure.
        save: One checkpoint.
        hidden_save: Part of the save that overlaps the next step's rollout; at most the rollout's time.
        save_interval: Steps between checkpoints.
        failures_per_second: Failure rate of all nodes together.
        node_loss_share: Share of the failures that lose a node.
        spares: Spare nodes of an allocation; without one left, a loss is requeued, which restores all spares.
        refill: Time from the use of a spare node until its replacement arrives; infinite without replacement.
        restart: Durations of restarts.
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
    """Return the share of wall time spent on kept steps, for each save interval.

    Scenarios of the same seed get the same failures, scaled by their rates, so differences are not random.

    Args:
        scenario: The run to simulate, with a positive failure rate; its own interval is ignored.
        intervals: Steps between checkpoints.
        seed: Seed of the failures.
    """
    random, shape = np.random.default_rng(seed), (NUM_FAILURES, NUM_RUNS)
    seconds = random.exponential(size=shape) / scenario.failures_per_second
    trained = seconds - _restarts(scenario, seconds, random.random(size=shape))
    kept = _kept_steps(scenario, np.array(intervals, dtype=np.float64)[:, None], trained)
    return [float(share) for share in kept * scenario.step / seconds.sum()]


def best_of(intervals: Sequence[int], shares: Sequence[float]) -> tuple[int, float]:
    """Return the save interval with the largest share, and the share; ties prefer the longest interval."""
    share, interval = max(zip(shares, intervals, strict=True))
    return interval, share


def _restarts(scenario: Scenario, seconds: Array, draws: Array) -> Array:
    """Return the time that each run restarts before it trains until its next failure [failure, run].

    Args:
        scenario: The simulated run.
        seconds: Time from each failure to the next [failure, run].
        draws: Uniform in [0, 1); decide whether a failure loses a node [failure, run].
    """
    runs, places = np.arange(seconds.shape[1]), np.arange(max(1, scenario.spares))[:, None]
    # Seconds until each spare node is available [place, run]; infinite for places beyond the number of spares.
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
    """Return the steps of committed checkpoints for each save interval, summed over all runs.

    Args:
        scenario: The simulated run.
        interval: Steps between checkpoints [interval, 1].
        trained: Seconds between a restart's end and the next failure; negative if it is interrupted [failure, run].
    """
    until_new_saved = interval * scenario.step + scenario.save
    cycle = until_new_saved - scenario.hidden_save
    # The rollout that overlaps a save may end before it.
    most = interval + (scenario.hidden_save > 0)
    rolled_out = saves = np.zeros((len(interval), trained.shape[1]))
    for seconds in trained:
        redone = np.minimum(rolled_out, interval)
        later = seconds - (until_new_saved - redone * (scenario.step - scenario.redone_step))
        is_saved = later >= 0.0
        cycles = np.floor(later / cycle)
        saves = saves + np.where(is_saved, 1 + cycles, 0.0)
        # The steps since the last checkpoint that existed at the start of this attempt come first. When a checkpoint is
        # committed, the next rollout has already run for the hidden part of the save.
        since_saved = later - cycles * cycle + scenario.hidden_save
        new = np.where(is_saved, since_saved, seconds - redone * scenario.redone_step)
        before = np.where(is_saved, 0.0, rolled_out)
        rolled_out = np.minimum(before + _rollouts_in(scenario, np.maximum(new, 0.0)), most)
    return saves.sum(axis=1) * interval[:, 0]


def _rollouts_in(scenario: Scenario, seconds: Array) -> Array:
    """Return the number of new steps' rollouts that end within the given seconds; a step starts with its rollout."""
    whole = np.floor(seconds / scenario.step)
    return whole + (seconds - whole * scenario.step >= scenario.step - scenario.redone_step)

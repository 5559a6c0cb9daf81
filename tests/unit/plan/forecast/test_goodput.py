"""The simulation against closed forms, against an event-by-event simulation, and the invariants of its features."""

import dataclasses
import math
import random

import pytest

from posttrain.plan.forecast.goodput import (
    RestartSeconds,
    Scenario,
    best_of,
    effective_shares,
)

SAME = RestartSeconds(120.0, 120.0, 120.0)
# A step of 10 s whose rollout takes 8, a failure an hour.
RUN = Scenario(
    step=10.0,
    redone_step=2.0,
    save=20.0,
    hidden_save=8.0,
    save_interval=20,
    failures_per_second=1 / 3600,
    node_loss_share=0.5,
    spares=1,
    refill=math.inf,
    restart=RestartSeconds(60.0, 120.0, 900.0),
)
WITHOUT_REPLAY = dataclasses.replace(RUN, redone_step=RUN.step, restart=SAME)
# Some 12,000 failures of each scenario: the share's standard error is about 0.2 %.
CLOSE = 0.006


def share_of(scenario: Scenario, seed: int = 0) -> float:
    """Return the share with the scenario's own interval."""
    return effective_shares(scenario, [scenario.save_interval], seed)[0]


def share_without_failures(scenario: Scenario) -> float:
    """Return k s / (k s + c - h): waiting for saves is all that is lost."""
    kept = scenario.save_interval * scenario.step
    return kept / (kept + scenario.save - scenario.hidden_save)


def share_without_replay(scenario: Scenario) -> float:
    """Return the expected share when every restart takes `restart.in_place` and nothing is replayed.

        share = l w exp(-l (R + w + c)) / (1 - exp(-l (w + c - h))),  w = k s,  l failures per second

    The first checkpoint of an attempt counts after R + w + c seconds, each further one w + c - h later. Source, for
    h = 0: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 20, which is exact for exponential failures.
    """
    rate, work = scenario.failures_per_second, scenario.save_interval * scenario.step
    first, cycle = scenario.restart.in_place + work + scenario.save, work + scenario.save - scenario.hidden_save
    return rate * work * math.exp(-rate * first) / -math.expm1(-rate * cycle)


def young_interval_seconds(save: float, failures_per_second: float) -> float:
    """Return the work between saves that loses least, to first order: sqrt(2 c / l).

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17
    (1974).

    Example:
        Saves of 50 s, a failure in 10,000 s: 1,000 s.
    """
    return math.sqrt(2 * save / failures_per_second)


@pytest.mark.parametrize("hidden", [0.0, 8.0, 20.0])
@pytest.mark.parametrize("interval", [1, 5, 20, 38, 100])
def test_without_replay_it_is_dalys_formula(interval, hidden):
    scenario = dataclasses.replace(WITHOUT_REPLAY, save_interval=interval, hidden_save=hidden)
    assert share_of(scenario) == pytest.approx(share_without_replay(scenario), rel=CLOSE)


def test_the_formula_is_dalys_where_nothing_else_happens_during_a_save():
    scenario = dataclasses.replace(WITHOUT_REPLAY, hidden_save=0.0)
    rate, work = scenario.failures_per_second, scenario.save_interval * scenario.step
    daly = rate * work * math.exp(-rate * 120.0) / math.expm1(rate * (work + scenario.save))
    assert share_without_replay(scenario) == pytest.approx(daly)


def test_the_best_interval_is_youngs():
    scenario = dataclasses.replace(WITHOUT_REPLAY, hidden_save=0.0, restart=RestartSeconds(0.0, 0.0, 0.0))
    intervals = range(5, 120)
    interval, share = best_of(intervals, effective_shares(scenario, intervals))
    young = young_interval_seconds(scenario.save, scenario.failures_per_second) / scenario.step
    assert young == pytest.approx(37.9, abs=0.1)
    assert 0.75 * young < interval < 1.25 * young
    # Around the best the share hardly changes: to first order 1 - sqrt(2 c l).
    assert share == pytest.approx(1 - math.sqrt(2 * scenario.save * scenario.failures_per_second), abs=0.01)


def test_without_failures_only_saves_are_lost():
    rare = dataclasses.replace(RUN, failures_per_second=1e-9)
    assert share_of(rare) == pytest.approx(share_without_failures(rare), rel=1e-4)
    assert share_without_failures(rare) == 200 / 212


def test_a_failure_before_each_checkpoint_keeps_nothing():
    hopeless = dataclasses.replace(RUN, save_interval=100_000)
    assert share_of(hopeless) == 0.0


def step_by_step(run: Scenario, failures: int) -> float:
    """Return the share of one run, told event by event, with failures of its own."""
    dice = random.Random(3)
    now, kept, rolled_out = 0.0, 0, 0
    come = [0.0] * run.spares
    for _ in range(failures):
        failure = now + dice.expovariate(run.failures_per_second)
        seconds = run.restart.in_place
        if dice.random() < run.node_loss_share:
            ready = [time for time in come if time <= now]
            seconds = run.restart.on_spare if ready else run.restart.requeued
            if ready:
                come[come.index(ready[0])] = now + run.refill
            else:
                come = [now] * run.spares
        committed, rolled_out = train_until(failure, now + seconds, run, rolled_out)
        kept, now = kept + committed, failure
    return kept * run.step / now


def train_until(failure: float, now: float, run: Scenario, rolled_out: int) -> tuple[int, int]:
    """Return the steps committed until a failure, and the rollouts on disk then since the last checkpoint.

    Args:
        failure: When it fails.
        now: When training begins.
        run: What trains.
        rolled_out: Rollouts on disk since the last checkpoint.
    """
    kept = step = 0
    while True:
        is_saved = step > 0 and step % run.save_interval == 0
        saved = now + run.save if is_saved else now
        rolled = now if run.hidden_save else saved
        if step >= rolled_out:
            rolled += run.step - run.redone_step
        kept = step if is_saved and saved <= failure else kept
        rolled_out = max(rolled_out, step + 1) if rolled <= failure else rolled_out
        now = max(saved, rolled) + run.redone_step
        if now > failure:
            return kept, rolled_out - kept
        step += 1


@pytest.mark.parametrize("refill", [math.inf, 7200.0])
@pytest.mark.parametrize(
    ("interval", "save", "hidden"),
    [(1, 5, 5), (1, 20, 8), (3, 20, 0), (3, 45, 8), (20, 7, 7), (20, 200, 8), (60, 20, 0), (60, 20, 8)],
)
def test_with_replay_it_is_what_happens_event_by_event(interval, save, hidden, refill):
    scenario = dataclasses.replace(
        RUN, save_interval=interval, save=float(save), hidden_save=float(hidden), refill=refill, spares=2
    )
    assert share_of(scenario) == pytest.approx(step_by_step(scenario, 8000), rel=0.01)


def test_each_feature_gains():
    bare = dataclasses.replace(RUN, redone_step=RUN.step, hidden_save=0.0)
    shares = [
        share_of(scenario)
        for scenario in (
            dataclasses.replace(bare, restart=RestartSeconds(900.0, 900.0, 900.0), spares=0),
            dataclasses.replace(bare, spares=0),
            bare,
            dataclasses.replace(bare, redone_step=RUN.redone_step),
            RUN,
            dataclasses.replace(RUN, refill=7200.0),
            dataclasses.replace(RUN, spares=4),
        )
    ]
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


def test_the_same_seed_gives_the_same_shares_and_another_hardly_other_ones():
    assert share_of(RUN, seed=1) == share_of(RUN, seed=1)
    assert share_of(RUN, seed=1) != share_of(RUN, seed=2)
    assert share_of(RUN, seed=1) == pytest.approx(share_of(RUN, seed=2), rel=2 * CLOSE)


def test_of_equal_shares_the_longest_interval_is_best():
    assert best_of([1, 2, 3], [0.5, 0.7, 0.7]) == (3, 0.7)

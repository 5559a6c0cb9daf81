"""The simulation against closed forms, against an event-by-event simulation, and the invariants of its features."""

import dataclasses
import math
import random

import pytest

from posttrain.planner.goodput import (
    RestartSeconds,
    Scenario,
    best_of,
    effective_shares,
    share_without_failures,
    share_without_replay,
    with_intervals,
    young_interval_seconds,
)

SAME = RestartSeconds(120.0, 120.0, 120.0)
# A step of 10 s whose rollout takes 8, a failure an hour.
RUN = Scenario(
    step=10.0,
    redone_step=2.0,
    save=20.0,
    save_interval=20,
    failures_per_second=1 / 3600,
    node_loss_share=0.5,
    spares=1,
    restart=RestartSeconds(60.0, 120.0, 900.0),
)
WITHOUT_REPLAY = dataclasses.replace(RUN, redone_step=RUN.step, restart=SAME)
# Some 12,000 failures of each scenario: the share's standard error is about 0.2 %.
CLOSE = 0.006


@pytest.mark.parametrize("interval", [1, 5, 20, 38, 100])
def test_without_replay_it_is_dalys_formula(interval):
    scenario = dataclasses.replace(WITHOUT_REPLAY, save_interval=interval)
    assert effective_shares([scenario]) == pytest.approx([share_without_replay(scenario)], rel=CLOSE)


def test_the_best_interval_is_youngs():
    scenario = dataclasses.replace(WITHOUT_REPLAY, restart=RestartSeconds(0.0, 0.0, 0.0))
    intervals = range(5, 120)
    interval, share = best_of(intervals, effective_shares(with_intervals(scenario, intervals)))
    young = young_interval_seconds(scenario.save, scenario.failures_per_second) / scenario.step
    assert young == pytest.approx(37.9, abs=0.1)
    assert 0.75 * young < interval < 1.25 * young
    # Around the best the share hardly changes: to first order 1 - sqrt(2 c l).
    assert share == pytest.approx(1 - math.sqrt(2 * scenario.save * scenario.failures_per_second), abs=0.01)


def test_without_failures_only_saves_are_lost():
    rare = dataclasses.replace(RUN, failures_per_second=1e-9)
    assert effective_shares([rare]) == pytest.approx([share_without_failures(rare)], rel=1e-4)
    assert share_without_failures(rare) == 200 / 220


def test_a_failure_before_each_checkpoint_keeps_nothing():
    hopeless = dataclasses.replace(RUN, save_interval=100_000)
    assert effective_shares([hopeless]) == [0.0]


def step_by_step(run: Scenario, failures: int) -> float:
    """Return the share of one run, told event by event, with failures of its own."""
    dice = random.Random(3)
    kept = rolled_out = since = 0
    spares = run.spares
    wall = 0.0
    for _ in range(failures):
        left = dice.expovariate(run.failures_per_second)
        wall += left
        seconds = run.restart.in_place
        if dice.random() < run.node_loss_share:
            seconds = run.restart.on_spare if spares else run.restart.requeued
            spares = spares - 1 if spares else run.spares
        events = [("restart", seconds)]
        since = 0
        while True:
            for name, length in events:
                left -= length
                if left < 0:
                    break
                if name == "rollout":
                    rolled_out += 1
                elif name == "rest":
                    since += 1
                elif name == "save":
                    kept, since, rolled_out = kept + run.save_interval, 0, 0
            if left < 0:
                break
            if since == run.save_interval:
                events = [("save", run.save)]
            elif since < rolled_out:
                events = [("rest", run.redone_step)]
            else:
                events = [("rollout", run.step - run.redone_step), ("rest", run.redone_step)]
    return kept * run.step / wall


@pytest.mark.parametrize("interval", [3, 20, 60])
def test_with_replay_it_is_what_happens_event_by_event(interval):
    scenario = dataclasses.replace(RUN, save_interval=interval)
    assert effective_shares([scenario]) == pytest.approx([step_by_step(scenario, 8000)], rel=0.01)


def test_each_feature_gains():
    shares = effective_shares(
        [
            dataclasses.replace(RUN, restart=RestartSeconds(900.0, 900.0, 900.0), redone_step=RUN.step),
            dataclasses.replace(RUN, spares=0, redone_step=RUN.step),
            dataclasses.replace(RUN, redone_step=RUN.step),
            RUN,
            dataclasses.replace(RUN, spares=4),
        ]
    )
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


def test_the_same_seed_gives_the_same_shares_and_another_hardly_other_ones():
    assert effective_shares([RUN], seed=1) == effective_shares([RUN], seed=1)
    assert effective_shares([RUN], seed=1) != effective_shares([RUN], seed=2)
    assert effective_shares([RUN], seed=1) == pytest.approx(effective_shares([RUN], seed=2), rel=2 * CLOSE)


def test_of_equal_shares_the_longest_interval_is_best():
    assert best_of([1, 2, 3], [0.5, 0.7, 0.7]) == (3, 0.7)

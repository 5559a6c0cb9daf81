"""Steps of engines that run ahead, in the plan's rates."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from posttrain.plan.timing import async_steps
from posttrain.plan.timing.async_steps import EngineFleet, bound_seconds, response_lengths, simulated_steps, steps_of
from posttrain.plan.timing.rollout_of_step import Workload, rollout_of_step, workload
from posttrain.plan.timing.step_time import step_durations, sync_seconds, training_seconds

SHARED_STORAGE = 20e9
AHEAD = "algorithm.preset=tis engine.own_nodes=2"


@pytest.fixture
def glm5(resolved):
    """Return GLM-5 on 32 nodes with two engines, without speculation."""
    words = "engine.mtp_steps=0 engine.num_engines=2 engine.pd.num_prefill_engines=0"
    return resolved("glm5", nodes=32, recipe="production", set=words).config


def test_lengths_have_the_planned_mean_and_reach_the_longest() -> None:
    lengths = [*itertools.islice(response_lengths(Workload(1, 0.0, 1000.0, 0.7)), 20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(700, rel=0.01)
    assert 999 < max(lengths) <= 1000
    assert {*itertools.islice(response_lengths(Workload(1, 0.0, 1000.0, 1.0)), 10)} == {1000.0}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("prefills", [0, 1])
def test_without_staleness_it_is_the_synchronous_step(resolved, prefills: int, drafts: int) -> None:
    """The rollout of the plan is a sum over slices, and this one of draws: they agree within a fiftieth."""
    words = f"engine.mtp_steps={drafts} engine.pd.num_prefill_engines={prefills}"
    config = resolved("glm5", nodes=32, recipe="production", set=words).config
    work, steps = workload(config), steps_of(config, 400.0, 5.0)
    simulated = simulated_steps(EngineFleet.of(config), work, steps)
    assert simulated.step_seconds == pytest.approx(rollout_of_step(config, work).seconds + 405, rel=0.02)


def test_a_smaller_simulation_keeps_places_and_tail(glm5) -> None:
    """512 groups of 16 on an engine of 512 places: no more than fit run. A tail of half of 8 groups is four groups."""
    engines = dataclasses.replace(EngineFleet.of(glm5), num_engines=1, max_running=512)
    many = dataclasses.replace(steps_of(glm5, 400.0, 5.0), batch_size=512, group_size=16)
    assert async_steps._weight(engines, many) == 32
    few = dataclasses.replace(many, batch_size=8, group_size=128, tail_fraction=0.5)
    assert async_steps._weight(dataclasses.replace(engines, max_running=2048), few) == 4


@pytest.mark.parametrize("max_staleness", [1, 4])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_fewer_requests_stand_for_all(glm5, monkeypatch, max_staleness: int, mode: str) -> None:
    """The plan simulates an eighth of the requests, each with the load of eight."""
    fleet, work = EngineFleet.of(glm5), workload(glm5)
    steps = dataclasses.replace(steps_of(glm5, 400.0, 3.0), max_staleness=max_staleness, on_new_weights=mode)
    few = simulated_steps(fleet, work, steps)
    monkeypatch.setattr(async_steps, "MOST_REQUESTS", 10**6)
    assert few.step_seconds == pytest.approx(simulated_steps(fleet, work, steps).step_seconds, rel=0.02)


@pytest.mark.parametrize("train_seconds", [100.0, 500.0, 2000.0])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_step_is_faster_than_the_bound(glm5, max_staleness: int, train_seconds: float) -> None:
    fleet, work = EngineFleet.of(glm5), workload(glm5)
    steps = dataclasses.replace(steps_of(glm5, train_seconds, 3.0), max_staleness=max_staleness, on_new_weights="keep")
    bound, step = bound_seconds(fleet, work, steps), simulated_steps(fleet, work, steps).step_seconds
    assert bound <= step * 1.001
    if train_seconds == 2000 and max_staleness:
        assert step == pytest.approx(2003)


class Affine:
    """A token takes a time without load and one for each request of the engine."""

    def __init__(self, alone: float, per_request: float):
        self.alone, self.per_request = alone, per_request

    def token_seconds(self, num_requests: float, context: float) -> float:
        return self.alone + self.per_request * num_requests


@pytest.mark.parametrize("train_seconds", [100.0, 200.0, 500.0])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_bound_without_load(glm5, max_staleness: int, train_seconds: float) -> None:
    """The trainer; 1,024 responses of 0.7 of the longest on 2,048 places; or the longest, of which k + 1 overlap.

    Transfers of 3 s overlap with nothing.
    """
    fleet = dataclasses.replace(EngineFleet.of(glm5), decoder=Affine(0.01, 0.0))
    steps = dataclasses.replace(steps_of(glm5, train_seconds, 3.0), max_staleness=max_staleness)
    longest = 32768 * 0.01
    busy = 0.7 * longest / min(max_staleness + 1, 2)
    expected = 3 + max(train_seconds, busy, (longest + train_seconds) / (max_staleness + 1))
    assert bound_seconds(fleet, workload(glm5), steps) == pytest.approx(expected, rel=2e-3)


def test_the_bound_under_load(glm5) -> None:
    """Of a synchronous rollout: the longest response without load, and all tokens' load of two engines."""
    fleet = dataclasses.replace(EngineFleet.of(glm5), decoder=Affine(0.01, 1e-5))
    expected = 32768 * 0.01 + 1024 * 0.7 * 32768 * 1e-5 / 2 + 100 + 3
    assert bound_seconds(fleet, workload(glm5), steps_of(glm5, 100.0, 3.0)) == pytest.approx(expected, rel=5e-3)


def test_the_plan_s_step_is_the_asynchronous_one(resolved) -> None:
    """The phases add up to it, and the rollout is only what the trainer still waits for."""
    ahead = resolved("qwen3_4b", nodes=4, set=f"{AHEAD} rollout.max_staleness=4").config
    synchronous = resolved("qwen3_4b", nodes=4, set=AHEAD).config
    seconds, before = (step_durations(config, SHARED_STORAGE) for config in (ahead, synchronous))
    assert seconds["step_rollout"] < before["step_rollout"] / 2
    assert seconds["step_train"] == before["step_train"]
    steps = steps_of(ahead, training_seconds(ahead), sync_seconds(ahead, SHARED_STORAGE))
    expected = simulated_steps(EngineFleet.of(ahead), workload(ahead), steps).step_seconds
    assert seconds["step"] == pytest.approx(expected, abs=0.01)
    assert seconds["step_idle"] < seconds["step"]

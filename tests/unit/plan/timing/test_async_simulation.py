"""Asynchronous steps on a virtual clock: cases computed by hand, and what a benchmark has measured on a real one."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.async_rollouts import GROUPS, MEDIAN_TOKENS, MOST_MEDIANS, SAMPLES
from benchmarks.scripted_engine import length_of

from posttrain.plan.timing.async_simulation import AsyncSteps, SharedEngines, SimulatedSteps, simulate

# A token takes a second, however many requests run; prompts take no time.
ENGINES = SharedEngines(lambda running, context: 1.0, lambda requests, tokens: 0.0, max_running=10**6)
# One request of 100 tokens per step, and an update of 60 s.
ONE = AsyncSteps(batch_size=1, group_size=1, max_staleness=1, train_seconds=60.0)
BENCHMARKS = Path(__file__).parents[4] / "benchmarks" / "README.md"


def of_100_tokens(steps: AsyncSteps, engines: SharedEngines = ENGINES, first: float = 100.0) -> SimulatedSteps:
    """Simulate responses of 100 tokens, over a number of steps that all periods of `max_staleness` + 1 divide.

    Args:
        steps: What a step does.
        engines: The engines.
        first: Tokens of the very first response. With 20 the two that run at a time take turns.
    """
    return simulate(steps, engines, itertools.chain([first], itertools.repeat(100.0)), num_steps=60)


@pytest.mark.parametrize("train_seconds", [100.0, 50.0, 25.0])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_equal_lengths_reach_the_bound(max_staleness: int, train_seconds: float) -> None:
    """`max_staleness` + 1 rollouts run at a time, and the trainer is never faster than itself."""
    steps = AsyncSteps(4, 2, max_staleness, train_seconds)
    expected = max(train_seconds, (100 + train_seconds) / (max_staleness + 1))
    simulated = of_100_tokens(steps)
    assert simulated.step_seconds == pytest.approx(expected)
    assert simulated.trainer_idle == pytest.approx(1 - train_seconds / expected)


def test_without_staleness_a_step_is_its_parts_one_after_the_other() -> None:
    """Prefill of eight prompts, a token that takes 0.01 s per request, the update and the transfer."""
    engines = SharedEngines(lambda running, context: 0.01 * running, lambda requests, tokens: requests * tokens, 8)
    steps = AsyncSteps(4, 2, 0, train_seconds=30.0, sync_seconds=5.0, prompt_tokens=3.0)
    simulated = of_100_tokens(steps, engines)
    assert simulated.step_seconds == pytest.approx(8 * 3 + 100 * 0.08 + 30 + 5)
    assert simulated.num_running == pytest.approx(8 * 8 / (24 + 8 + 30 + 5))
    assert simulated.staleness == 0


def test_decoding_slows_down_with_context() -> None:
    """A request of 100 tokens behind a prompt of 50 has 100 tokens of context on average."""
    engines = dataclasses.replace(ENGINES, token_seconds=lambda running, context: 0.02 * context)
    assert of_100_tokens(
        dataclasses.replace(ONE, max_staleness=0, prompt_tokens=50.0), engines
    ).step_seconds == pytest.approx(100 * 2 + 60)


def test_a_kept_cache_costs_nothing() -> None:
    """One request starts at each update, every 80 s; 80 of its tokens are an update older than the other 20."""
    simulated = of_100_tokens(dataclasses.replace(ONE, on_new_weights="keep"), first=20.0)
    assert (simulated.step_seconds, simulated.pause_seconds) == pytest.approx((80, 0))
    assert simulated.staleness == pytest.approx(0.8)


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_the_context_of_running_requests_is_prefilled_again(mode: str) -> None:
    """Each update finds a request with 80 tokens, for which all stand still for 10 s; each meets two updates."""
    engines = dataclasses.replace(ENGINES, prefill_seconds=lambda requests, tokens: requests * tokens / 8)
    simulated = of_100_tokens(dataclasses.replace(ONE, on_new_weights=mode), engines, first=20.0)
    assert (simulated.step_seconds, simulated.pause_seconds) == pytest.approx((90, 10))


def test_requests_that_finish_hold_new_weights_up() -> None:
    """The update ends after 60 s, and the request that began with it after 100."""
    simulated = of_100_tokens(dataclasses.replace(ONE, on_new_weights="finish"))
    assert (simulated.step_seconds, simulated.pause_seconds) == pytest.approx((100, 40))
    assert simulated.trainer_idle == pytest.approx(0.4)


def test_no_request_starts_while_others_finish() -> None:
    """With few places many groups wait for one. An update waits for those that run: never longer than for one."""
    steps = AsyncSteps(8, 1, 1, train_seconds=10.0, on_new_weights="finish")
    engines = dataclasses.replace(ENGINES, max_running=3)
    simulated = simulate(steps, engines, itertools.cycle([100.0, 60.0, 90.0, 70.0]), 20)
    assert 0 < simulated.pause_seconds <= 100


def test_new_weights_wait_for_requests_in_prefill() -> None:
    """Other engines prefill one request at a time, for 300 s, while two more have been started.

    An update of 60 s waits for all three, and then one request starts at each: 300 s in prefill and 100 s of decoding.
    """
    engines = dataclasses.replace(ENGINES, prefill_seconds=lambda requests, tokens: 300.0, prefills_apart=True)
    steps = dataclasses.replace(ONE, max_staleness=2, on_new_weights="finish")
    simulated = of_100_tokens(steps, engines)
    assert (simulated.step_seconds, simulated.staleness) == pytest.approx((400, 2))


def test_both_sides_stand_still_during_a_transfer() -> None:
    """As for 60 s of update, and each request meets one transfer of 20 s: (100 + 20 + 60 + 20) / 2."""
    steps = dataclasses.replace(ONE, sync_seconds=20.0, on_new_weights="keep")
    assert of_100_tokens(steps).step_seconds == pytest.approx(100)


def test_engines_run_as_many_requests_as_they_have_places_for() -> None:
    """With places for one batch engines are the limit, however far ahead they may run."""
    steps = AsyncSteps(4, 2, 4, train_seconds=10.0)
    simulated = of_100_tokens(steps, dataclasses.replace(ENGINES, max_running=8))
    assert simulated.step_seconds == pytest.approx(100)
    assert simulated.num_running == pytest.approx(8)


def test_responses_that_have_ended_leave_their_places_to_others() -> None:
    """Groups of 100 and 50 tokens keep six places full: two start every 50 s, not three every 100."""
    steps = AsyncSteps(4, 2, 4, train_seconds=10.0)
    engines = dataclasses.replace(ENGINES, max_running=6)
    simulated = simulate(steps, engines, itertools.cycle([100.0, 50.0]), 20)
    assert simulated.step_seconds == pytest.approx(4 * 25)
    assert simulated.num_running == pytest.approx(6)


def test_engines_that_only_prefill_delay_new_requests_alone() -> None:
    """A prompt takes 10 s: of the engine that decodes, or of another beside it."""
    steps = AsyncSteps(1, 1, 1, train_seconds=1.0, on_new_weights="keep", prompt_tokens=10.0)
    engines = dataclasses.replace(ENGINES, prefill_seconds=lambda requests, tokens: requests * tokens)
    together = of_100_tokens(steps, engines).step_seconds
    apart = of_100_tokens(steps, dataclasses.replace(engines, prefills_apart=True)).step_seconds
    # Two requests run at a time, and each is interrupted by the other's prompt.
    assert (together, apart) == pytest.approx(((100 + 2 * 10 + 1) / 2, (100 + 10 + 1) / 2))


def log_normal(seed: int) -> Iterator[float]:
    draw = random.Random(seed)
    return (min(100 * draw.lognormvariate(0, 1), 800.0) for _ in itertools.count())


@pytest.mark.parametrize("mode", ["recompute", "keep", "finish", "abort"])
@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_nothing_is_older_than_the_bound(mode: str, max_staleness: int) -> None:
    """The queue itself raises for a group that is older. With slow updates all tokens are as old as they may be."""
    quick, slow = (AsyncSteps(8, 4, max_staleness, seconds, 5.0, 10.0, mode) for seconds in (50.0, 5000.0))
    assert 0 < simulate(quick, ENGINES, log_normal(1), 30).staleness < max_staleness + 1e-9
    assert simulate(slow, ENGINES, log_normal(1), 30).staleness == pytest.approx(max_staleness)


def measured_rows() -> dict[tuple[float, int], tuple[float, float, float]]:
    """Return (update over rollout, staleness) -> seconds, gain and bound that `benchmarks/async_rollouts.py` wrote."""
    block = BENCHMARKS.read_text().split("<!-- written by async_rollouts.py -->")[1].split("| tail_fraction |")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in block.splitlines()]
    numbers = [[float(cell) for cell in row[:5]] for row in rows if row[0].replace(".", "").isdigit()]
    return {(share, int(staleness)): (seconds, gain, bound) for share, staleness, seconds, gain, bound in numbers}


@pytest.mark.parametrize(("share", "max_staleness"), [key for key in measured_rows() if key[1]])
def test_the_wall_clock_agrees(share: float, max_staleness: int) -> None:
    """The same lengths and batches, with the benchmark's own update, beside the rollout that its steps had."""
    rows, size = measured_rows(), GROUPS * SAMPLES
    lengths = [length_of(seed, MEDIAN_TOKENS, MOST_MEDIANS) for seed in range(100 * size)]
    longest = sum(max(lengths[start : start + size]) for start in range(0, len(lengths), size)) / 100
    # The bound at 4 is a synchronous step over its update. What a step takes beside its update is seen where the
    # trainer never waits: the longer update, and the largest staleness.
    update = longest / (rows[share, 4][2] - 1)
    update_seconds = rows[1.0, 0][0] / rows[1.0, 4][2]
    beside = (rows[1.0, 4][0] / update_seconds - 1) * longest / (rows[1.0, 4][2] - 1)
    synchronous = simulate(AsyncSteps(GROUPS, SAMPLES, 0, update), ENGINES, map(float, lengths), num_steps=80)
    ahead = AsyncSteps(GROUPS, SAMPLES, max_staleness, update, sync_seconds=beside, on_new_weights="keep")
    seconds = simulate(ahead, ENGINES, map(float, lengths), num_steps=80).step_seconds
    assert synchronous.step_seconds / seconds == pytest.approx(rows[share, max_staleness][1], rel=0.1)


def test_a_tail_goes_on_after_the_update() -> None:
    """Two groups of 100 and 300 tokens by turns, one of them left: each step waits for the shorter rest.

    The first step takes the group of 100. 200 tokens of the other are left, of which the second step's new group of 100
    takes the first half; the third starts another of 300, and takes the one that has 100 left. So every two steps
    generate 100 + 100 tokens, where synchronous steps of 100 and 300 take 400.
    """
    steps = AsyncSteps(1, 1, 2, train_seconds=60.0, sync_seconds=5.0, on_new_weights="abort", tail_fraction=1.0)
    lengths = itertools.cycle([100.0, 300.0])
    engines = dataclasses.replace(ENGINES, prefill_seconds=lambda requests, tokens: 7.0 * (tokens > 0))
    simulated = simulate(steps, engines, lengths, num_steps=60)
    whole = simulate(dataclasses.replace(steps, max_staleness=0, tail_fraction=0.0), engines, lengths, num_steps=60)
    assert whole.step_seconds == pytest.approx(200 + 65)
    assert simulated.step_seconds == pytest.approx(100 + 65 + 7), "and the context that goes on is prefilled again"
    assert simulated.pause_seconds == pytest.approx(7)

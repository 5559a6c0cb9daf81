"""Steps of engines that run ahead, in the plan's rates: `async_simulation` with the engines of `decoding`.

Responses have the distribution of `decoding`: a share (1 - x)^a of them is longer than a fraction x of the longest.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from posttrain.config.schema import Config
from posttrain.plan.timing.async_simulation import AsyncSteps, SharedEngines, SimulatedSteps, simulate
from posttrain.plan.timing.decoding import Decoder, DecodingGpus, prefill_seconds
from posttrain.plan.timing.rates import MOST_SPECULATION_GAIN
from posttrain.plan.timing.rollout_of_step import Workload, engine_of, running_requests, workload
from posttrain.trajectory_queue import groups_of_tail

# A tail of a simulated step may be longer by this share than the run's.
ROUNDING = 0.1
# Requests of a simulated step. Of more, each stands for several; that moves a step by less than a hundredth.
MOST_REQUESTS = 128
# Steps to average over, and bits of a number of requests and of a context, by which decode times are looked up.
NUM_STEPS, BITS = 6, 4
SEED = 1
# Numbers of running requests, parts of the tokens, and halvings with which a bound is searched.
LOADS, PHASE_PARTS, SEARCH = 8, 16, 10


@dataclass(frozen=True)
class EngineFleet:
    """The engines of a run.

    Args:
        engine: One of them; the decoding one if prefill is separate.
        num_engines: Their number, those that only prefill apart.
        max_running: Requests that one runs at once.
        decoder: The times of one.
    """

    engine: DecodingGpus
    num_engines: int
    max_running: int
    decoder: Decoder

    @staticmethod
    def of(config: Config) -> EngineFleet:
        """Return a configuration's engines."""
        engine, most = engine_of(config), running_requests(config)
        return EngineFleet(engine, config.engine.num_engines, most, Decoder(engine))

    @property
    def places(self) -> int:
        """Requests that all of them run at once."""
        return self.num_engines * self.max_running

    @cached_property
    def _plain(self) -> Decoder:
        return Decoder(replace(self.engine, num_drafts=0))

    def token_seconds(self, running: float, context: float) -> float:
        """Return the time per token and request of one engine; speculation is limited as in a synchronous rollout."""
        seconds = self.decoder.token_seconds(running, context)
        if not self.engine.num_drafts:
            return seconds
        return max(seconds, self._plain.token_seconds(running, context) / MOST_SPECULATION_GAIN)

    def shared(self, weight: int = 1) -> SharedEngines:
        """Return them for a simulation in which every request stands for `weight` of them."""
        token_seconds, each = _looked_up(self.token_seconds), weight / self.num_engines
        return SharedEngines(
            token_seconds=lambda running, context: token_seconds(max(running * each, 1.0), context),
            prefill_seconds=lambda requests, tokens: prefill_seconds(self.engine, requests * each, tokens),
            max_running=max(self.places // weight, 1),
            prefills_apart=self.engine.prefill_gpus is not None,
        )


def simulated_steps(
    fleet: EngineFleet, work: Workload, steps: AsyncSteps, lengths: Iterator[float] | None = None
) -> SimulatedSteps:
    """Return what steps take.

    Args:
        fleet: The engines.
        work: Samples and lengths of a step.
        steps: What a step does.
        lengths: Tokens of one response after another, with the mean and the longest of `work`; by default
            `response_lengths`.
    """
    samples = steps.batch_size * steps.group_size
    fewer = replace(steps, batch_size=steps.batch_size // _weight(fleet, steps))
    scale = samples / (fewer.batch_size * steps.group_size)
    return simulate(fewer, fleet.shared(round(scale)), lengths or response_lengths(work), NUM_STEPS)


def _weight(fleet: EngineFleet, steps: AsyncSteps) -> int:
    """Return how many requests one of the simulation stands for: engines still hold a group, and a tail is as long."""
    tail, batch = steps.tail_fraction, steps.batch_size

    def keeps_shape(weight: int) -> bool:
        left = groups_of_tail(tail, batch // weight) / (batch // weight)
        return fleet.places // weight >= steps.group_size and left <= tail * (1 + ROUNDING)

    most = min(max(batch * steps.group_size // MOST_REQUESTS, 1), batch)
    return next((weight for weight in range(most, 1, -1) if keeps_shape(weight)), 1)


def steps_of(config: Config, train_seconds: float, sync_seconds: float) -> AsyncSteps:
    """Return what a configuration's step does."""
    rollout = config.rollout
    return AsyncSteps(
        batch_size=rollout.rollout_batch_size,
        group_size=rollout.num_samples_per_prompt,
        max_staleness=rollout.max_staleness,
        train_seconds=train_seconds,
        sync_seconds=sync_seconds,
        prompt_tokens=workload(config).prompt_tokens,
        on_new_weights=rollout.on_new_weights,
        tail_fraction=rollout.tail_fraction,
    )


def bound_seconds(fleet: EngineFleet, work: Workload, steps: AsyncSteps) -> float:
    """Return what no step can be faster than, however well engines and trainer overlap. It takes

    - the trainer's time and the transfer;
    - the transfer, and the time of engines whose places are all taken, by up to `max_staleness` + 1 batches;
    - the time in which the longest response of a batch can be generated beside all others. It runs from the weights
      that it starts with to the step that trains on it: for k updates, and for k + 1 times what a step takes beside.
      In both parts engines may run as many requests as is best.

    Each context counts as the mean one.
    """
    trains = steps.train_seconds + steps.sync_seconds
    low = max(trains, steps.sync_seconds + busy_seconds(fleet, work, steps.max_staleness))
    rates = _rates(fleet, work, steps.max_staleness)
    high = low
    while _longest(rates, work, steps, high) < work.longest_response:
        low, high = high, 2 * high
    for _ in range(SEARCH if high > low else 0):
        middle = (low + high) / 2
        is_enough = _longest(rates, work, steps, middle) >= work.longest_response
        low, high = (low, middle) if is_enough else (middle, high)
    return low


def _rates(fleet: EngineFleet, work: Workload, max_staleness: int) -> list[tuple[float, float]]:
    """Return (tokens per second of all, of each) for numbers of running requests: the concave hull, from idle on."""
    most, context = _most_running(fleet, work, max_staleness), _mean_context(work)
    loads = [float(fleet.num_engines) * (most / fleet.num_engines) ** (part / LOADS) for part in range(LOADS + 1)]
    seconds = [fleet.token_seconds(max(load / fleet.num_engines, 1.0), context) for load in loads]
    hull = [(0.0, 1 / seconds[0])]
    for load, each in zip(loads, seconds, strict=True):
        point = (load / each, 1 / each)
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / max(second[0] - first[0], 1e-9)


def _each(rates: list[tuple[float, float]], total: float) -> float:
    """Return the tokens per second of each request where all get `total`."""
    for first, second in itertools.pairwise(rates):
        if total <= second[0]:
            return first[1] + (total - first[0]) * _slope(first, second)
    return rates[-1][1]


def _longest(rates: list[tuple[float, float]], work: Workload, steps: AsyncSteps, step_seconds: float) -> float:
    """Return the tokens of the longest response that can be trained on in time."""
    k, during = steps.max_staleness, steps.train_seconds * (steps.max_staleness > 0)
    beside = step_seconds - steps.train_seconds - steps.sync_seconds
    tokens, most = work.num_samples * work.mean_share * work.longest_response, rates[-1][0]
    # Tokens generated during the update, the others beside it.
    least, largest = max(tokens - beside * most, 0.0), min(during * most, tokens)
    best = 0.0
    for part in range(PHASE_PARTS + 1):
        generated = least + (largest - least) * part / PHASE_PARTS
        reached = k * during * _each(rates, generated / during) if during else 0.0
        reached += (k + 1) * beside * _each(rates, (tokens - generated) / beside) if beside > 0 else 0.0
        best = max(best, reached)
    return best


def busy_seconds(fleet: EngineFleet, work: Workload, ahead: float) -> float:
    """Return the time of engines for a step's tokens, with as many requests as they hold of 1 + `ahead` batches."""
    running = _most_running(fleet, work, ahead)
    seconds = fleet.token_seconds(max(running / fleet.num_engines, 1.0), _mean_context(work))
    return work.num_samples * work.mean_share * work.longest_response * seconds / running


def _most_running(fleet: EngineFleet, work: Workload, ahead: float) -> float:
    return min((1 + ahead) * work.num_samples, fleet.places)


def _mean_context(work: Workload) -> float:
    """Return the context of a token on average: half of the mean square of the lengths over their mean."""
    return work.prompt_tokens + work.longest_response / (1 / work.mean_share + 1)


def response_lengths(work: Workload, seed: int = SEED) -> Iterator[float]:
    """Yield the length of one response after another."""
    draw, power = random.Random(seed).random, work.mean_share / (1 - work.mean_share) if work.mean_share < 1 else 0.0
    while True:
        yield work.longest_response * (1 - draw() ** power if power else 1.0)


def _looked_up(token_seconds: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Return the same function of rounded arguments, evaluated once for each of them."""
    known: dict[tuple[float, float], float] = {}

    def look_up(running: float, context: float) -> float:
        key = (_rounded(running), _rounded(context))
        if key not in known:
            known[key] = token_seconds(*key)
        return known[key]

    return look_up


def _rounded(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, BITS)), exponent - BITS)

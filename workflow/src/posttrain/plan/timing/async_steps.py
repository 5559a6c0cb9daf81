"""Steps of engines that run ahead, in the plan's rates: `async_simulation` with the engines of `decoding`.

Responses have the distribution of `decoding`: a share (1 - x)^a of them is longer than a fraction x of the longest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from posttrain.config.schema import Config
from posttrain.plan.timing.async_simulation import AsyncSteps, SharedEngines, SimulatedSteps, simulate
from posttrain.plan.timing.decoding import Decoder, DecodingGpus, prefill_seconds
from posttrain.plan.timing.rollout_of_step import Workload, engine_of, workload

# Requests of a simulated step. Of more, each stands for several; that moves a step by less than a hundredth.
MOST_REQUESTS = 128
# Steps to average over, and bits of a number of requests and of a context, by which decode times are looked up.
NUM_STEPS, BITS = 6, 4
SEED = 1


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
        engine = engine_of(config)
        return EngineFleet(engine, config.engine.num_engines, config.engine.max_running_requests, Decoder(engine))

    @property
    def places(self) -> int:
        """Requests that all of them run at once."""
        return self.num_engines * self.max_running

    def shared(self, weight: int = 1) -> SharedEngines:
        """Return them for a simulation in which every request stands for `weight` of them."""
        token_seconds, each = _looked_up(self.decoder.token_seconds), weight / self.num_engines
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
    weight = min(max(samples // MOST_REQUESTS, 1), steps.batch_size)
    fewer = replace(steps, batch_size=steps.batch_size // weight)
    scale = samples / (fewer.batch_size * steps.group_size)
    return simulate(fewer, fleet.shared(round(scale)), lengths or response_lengths(work), NUM_STEPS)


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
    )


def bound_seconds(fleet: EngineFleet, work: Workload, steps: AsyncSteps) -> float:
    """Return what no step can be faster than, however well engines and trainer overlap: the largest of

    - the trainer's time and the transfer;
    - the transfer, and the time of engines whose places are all taken, by up to `max_staleness` + 1 batches;
    - the time of the longest response, alone on its engine, and of the trainer, of which `max_staleness` + 1 overlap.
    """
    alone = work.prompt_tokens + work.longest_response / 2
    longest = work.longest_response * fleet.decoder.token_seconds(1.0, alone)
    trains = steps.train_seconds + steps.sync_seconds
    busy = busy_seconds(fleet, work, steps.max_staleness)
    return max(trains, steps.sync_seconds + busy, (longest + trains) / (steps.max_staleness + 1))


def busy_seconds(fleet: EngineFleet, work: Workload, max_staleness: int) -> float:
    """Return the time of engines for a step's tokens, with as many requests as `max_staleness` allows and they hold."""
    running = min((max_staleness + 1) * work.num_samples, fleet.places)
    # A token's context on average: half of the mean square of the lengths over their mean.
    context = work.prompt_tokens + work.longest_response / (1 / work.mean_share + 1)
    seconds = fleet.decoder.token_seconds(max(running / fleet.num_engines, 1.0), context)
    return work.num_samples * work.mean_share * work.longest_response * seconds / running


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

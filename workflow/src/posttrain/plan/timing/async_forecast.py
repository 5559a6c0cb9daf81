"""Whether asynchronous training pays: the step of each mode with its own best split of the nodes.

    shared         synchronous, trainer and engines take turns on all nodes
    shared, tail F trainer and engines take turns, and a step leaves a share F of its groups to the next
    apart          synchronous, engines have nodes of their own and wait while the trainer works
    staleness k    engines run ahead by at most k updates, on nodes of their own

Each mode tries numbers of engines, in steps of a `PARTS`-th of the most, and of those that only prefill; the rest of
the nodes trains. Engines keep the configured size, and the trainer takes the configured layout's time, longer on fewer
nodes as it would be without a pipeline. Engines that hold requests while they get new weights do not draft. A
checkpoint hides behind the time in which the trainer waits; what is left of it, spread over the steps between two,
counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from posttrain.config.derived import prefill_gpus, trainer_nodes, uses_engines
from posttrain.config.queue_rules import HOLDING
from posttrain.config.schema import Config
from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing.async_simulation import AsyncSteps
from posttrain.plan.timing.async_steps import EngineFleet, bound_seconds, busy_seconds, simulated_steps, steps_of
from posttrain.plan.timing.decoding import Decoder
from posttrain.plan.timing.rollout_of_step import engine_of, rollout_of, running_requests, workload
from posttrain.plan.timing.step_time import state_fits, sync_seconds, training_seconds, training_seconds_on

STALENESS = (1, 4)
# Default tail fraction and staleness of the forecast.
TAIL, TAIL_STALENESS = 0.5, 2
SHARED, APART = "shared", "apart"
PARTS = 16
# The trainer is the limit if it waits for less than this share of the time.
LITTLE = 0.05


@dataclass(frozen=True)
class Mode:
    """A way to train, with its best split.

    Args:
        name: "shared", "shared, tail 0.5", "apart", or "staleness 1".
        max_staleness: 0 if synchronous.
        train_nodes: Nodes that train.
        num_engines: Engines that decode.
        num_prefill_engines: Engines that only prefill.
        step_seconds: Of a step, with its share of the wait for a checkpoint.
        bound_seconds: What no step of any split can be faster than (`async_steps`), without checkpoints.
        checkpoint_seconds: The share of the wait.
        pause_seconds: Time per update in which engines stand still for new weights, the transfer apart.
        trainer_idle: Share of a step in which the trainer waits for responses; None where GPUs are shared.
        engines_idle: Share of the tokens that engines with all places taken could generate, and do not.
        staleness: Age of a token in updates, on average.
    """

    name: str
    max_staleness: int
    train_nodes: int
    num_engines: int
    num_prefill_engines: int
    step_seconds: float
    bound_seconds: float
    checkpoint_seconds: float
    pause_seconds: float
    trainer_idle: float | None
    engines_idle: float
    staleness: float


@dataclass(frozen=True)
class NodeSplit:
    """A split of the nodes.

    Args:
        config: The configuration with the engines of this split.
        train_nodes: Nodes that train.
        train_seconds: Log-probabilities and training of a step.
        sync_seconds: Transfer of new weights.
        decoders: Number of drafts -> times of an engine.
    """

    config: Config
    train_nodes: int
    train_seconds: float
    sync_seconds: float
    decoders: dict[int, Decoder]

    def fleet(self, steps: AsyncSteps | None = None) -> EngineFleet:
        """Return the engines, which draft if the rules allow it (`config.queue_rules`); None: synchronous."""
        gpus, most = engine_of(self.config), running_requests(self.config)
        drafts = 0 if steps and steps.on_new_weights in HOLDING else gpus.num_drafts
        num_engines = self.config.engine.num_engines
        return EngineFleet(replace(gpus, num_drafts=drafts), num_engines, most, self.decoders[drafts])

    def steps(self, max_staleness: int, tail_fraction: float = 0.0) -> AsyncSteps:
        """Return what a step does."""
        steps = steps_of(self.config, self.train_seconds, self.sync_seconds)
        mode = "abort" if tail_fraction else steps.on_new_weights
        return replace(steps, max_staleness=max_staleness, tail_fraction=tail_fraction, on_new_weights=mode)


def forecast_modes(config: Config, shared_storage: float) -> list[Mode]:
    """Return each mode with its best split; those without a split that fits are left out.

    Args:
        config: The resolved configuration, with engines on GPUs.
        shared_storage: Bytes per second.
    """
    save = storage(config).training_checkpoint / shared_storage
    splits, shared = (splits_of(config, shared_storage, is_shared) for is_shared in (False, True))
    tail, staleness = config.rollout.tail_fraction, config.rollout.max_staleness
    found = [_synchronous(SHARED, shared, save)]
    found += [_tail(shared, fraction, staleness or TAIL_STALENESS, save) for fraction in sorted({TAIL, tail} - {0})]
    found.append(_synchronous(APART, splits, save))
    found += [_ahead(splits, bound, save) for bound in sorted({*STALENESS, *([] if tail else [staleness])} - {0})]
    return [mode for mode in found if mode]


def is_forecast(config: Config) -> bool:
    """Return whether modes can be compared: engines on GPUs."""
    return config.hardware.device == "cuda" and uses_engines(config)


def explained(config: Config, modes: list[Mode]) -> str:
    """Return which mode is the fastest, and what limits the best one that runs ahead, or leaves a tail."""
    fastest = min(modes, key=lambda mode: mode.step_seconds)
    synchronous = _best(mode for mode in modes if not mode.max_staleness)
    ahead = _best(mode for mode in modes if mode.max_staleness and mode.trainer_idle is not None)
    tail = _best(mode for mode in modes if mode.max_staleness and mode.trainer_idle is None)
    assert synchronous, "engines and trainer can always take turns"
    gain = synchronous.step_seconds / fastest.step_seconds
    if fastest.max_staleness:
        said = f"{fastest.name} is the fastest, {gain:.2f} times the best synchronous step"
    else:
        said = f"synchronous ({synchronous.name})"
    if ahead is None:
        of_tail = (
            [] if tail in (None, fastest) else [_compared(tail, synchronous, "most groups wait for long responses")]
        )
        return "; ".join([said, *of_tail, f"no split of {config.nodes} nodes leaves both trainer and engines enough"])
    limit = "the trainer limits it" if (ahead.trainer_idle or 0.0) < LITTLE else "engines limit it"
    if ahead is fastest:
        return f"{said}; {limit}"
    return f"{said}; {_compared(ahead, synchronous, *_hindrances(config, ahead), f'{limit} on a part of the nodes')}"


def _best(modes: Iterable[Mode]) -> Mode | None:
    return min(modes, key=lambda mode: mode.step_seconds, default=None)


def _compared(mode: Mode, synchronous: Mode, *reasons: str) -> str:
    share = synchronous.step_seconds / mode.step_seconds
    return f"{mode.name} reaches {share:.2f} of the synchronous speed: {', '.join(reasons)}"


def _hindrances(config: Config, ahead: Mode) -> Iterator[str]:
    """Yield what holds up a mode that runs ahead."""
    if ahead.checkpoint_seconds > LITTLE * ahead.step_seconds:
        wait = f"each step waits {ahead.checkpoint_seconds:.0f} s for checkpoints"
        yield f"{wait}, less with a larger trainer.save_interval"
    if config.engine.mtp_steps and config.rollout.on_new_weights in HOLDING:
        yield "it drafts (engine.mtp_steps) only with rollout.on_new_weights=abort"
    if ahead.pause_seconds > LITTLE * ahead.step_seconds:
        yield f"engines stand still for {ahead.pause_seconds:.0f} s at each update (rollout.on_new_weights)"


def forecast_part(config: Config, shared_storage: float) -> dict[str, object] | None:
    """Return the modes for `plan.json`; None if there are no engines on GPUs or no mode fits."""
    modes = forecast_modes(config, shared_storage) if is_forecast(config) else []
    if not modes:
        return None
    rows = [
        {key: round(value, 4) if isinstance(value, float) else value for key, value in dataclasses.asdict(mode).items()}
        for mode in modes
    ]
    fastest = min(modes, key=lambda mode: mode.step_seconds)
    return {
        "modes": rows,
        "fastest": fastest.name,
        "why": explained(config, modes),
        "on_new_weights": config.rollout.on_new_weights,
    }


def splits_of(config: Config, shared_storage: float, is_shared: bool) -> list[NodeSplit]:
    """Return all splits that leave the trainer enough nodes, or engines on all nodes that share them."""
    per_node, size, pd = config.hardware.gpus_per_node, config.engine.gpus_per_engine, config.engine.pd
    prefill_size = pd.gpus_per_prefill_engine if prefill_gpus(config) else size
    most, on_nodes = config.nodes * per_node // size, cache(lambda nodes: training_seconds_on(config, nodes))
    factor = training_seconds(config) / on_nodes(trainer_nodes(config))
    numbers = {most} if is_shared else {max(round(most * part / PARTS), 1) for part in range(1, PARTS + 1)}
    engine, splits = engine_of(config), []
    decoders = {drafts: Decoder(replace(engine, num_drafts=drafts)) for drafts in {0, engine.num_drafts}}
    for prefills in sorted({0, 1, pd.num_prefill_engines}):
        for count in sorted({number - prefills * is_shared for number in numbers}):
            nodes = (config.nodes * per_node - count * size - prefills * prefill_size) // per_node
            if is_shared and nodes >= 0:
                nodes = config.nodes
            if count < 1 or nodes < 1 or not state_fits(config, nodes):
                continue
            chosen = replace(pd, num_prefill_engines=prefills, gpus_per_prefill_engine=prefill_size)
            own = config.nodes - nodes
            split = replace(config, engine=replace(config.engine, num_engines=count, own_nodes=own, pd=chosen))
            splits.append(
                NodeSplit(split, nodes, factor * on_nodes(nodes), sync_seconds(split, shared_storage), decoders)
            )
    return splits


def _synchronous(name: str, splits: list[NodeSplit], save: float) -> Mode | None:
    def mode(split: NodeSplit) -> Mode:
        work, fleet = workload(split.config), split.fleet()
        rollout = rollout_of(fleet.engine, fleet.num_engines, work).seconds
        return _mode(split, None, 0.0, name, rollout + split.train_seconds + split.sync_seconds, rollout, save)

    return min(map(mode, splits), key=lambda one: one.step_seconds, default=None)


def _tail(splits: list[NodeSplit], tail_fraction: float, max_staleness: int, save: float) -> Mode | None:
    def mode(split: NodeSplit) -> Mode:
        name, steps = f"{SHARED}, tail {tail_fraction:g}", split.steps(max_staleness, tail_fraction)
        busy = busy_seconds(split.fleet(steps), workload(split.config), tail_fraction)
        least = steps.train_seconds + steps.sync_seconds + busy
        return replace(_simulated(split, steps, tail_fraction, name, save), bound_seconds=least)

    return min(map(mode, splits), key=lambda one: one.step_seconds, default=None)


def _ahead(splits: list[NodeSplit], max_staleness: int, save: float) -> Mode | None:
    """Return the best split, for each number of prefill engines by a search of the number of engines.

    A step first gets shorter with more engines, and then longer, because less of the nodes trains.
    """
    if not splits:
        return None
    name = f"staleness {max_staleness}"

    @cache
    def simulated(index: int) -> Mode:
        return _simulated(splits[index], splits[index].steps(max_staleness), max_staleness, name, save)

    best: Mode | None = None
    for prefills in sorted({split.config.engine.pd.num_prefill_engines for split in splits}):
        own = [i for i, split in enumerate(splits) if split.config.engine.pd.num_prefill_engines == prefills]
        bounds = [_bound(splits[index], max_staleness) for index in own]
        if best and min(bounds) >= best.step_seconds:
            continue
        low, high = 0, len(own) - 1
        while low < high:
            middle = (low + high) // 2
            if simulated(own[middle]).step_seconds <= simulated(own[middle + 1]).step_seconds:
                high = middle
            else:
                low = middle + 1
        best = min(best or simulated(own[low]), simulated(own[low]), key=lambda mode: mode.step_seconds)
    least = min(_bound(split, max_staleness) for split in splits)
    return None if best is None else replace(best, bound_seconds=least)


def _bound(split: NodeSplit, max_staleness: int) -> float:
    steps = split.steps(max_staleness)
    return bound_seconds(split.fleet(steps), workload(split.config), steps)


def _simulated(split: NodeSplit, steps: AsyncSteps, ahead: float, name: str, save: float) -> Mode:
    found = simulated_steps(split.fleet(steps), workload(split.config), steps)
    waits = found.trainer_idle * found.step_seconds
    mode = _mode(split, steps, ahead, name, found.step_seconds, waits, save)
    return replace(mode, staleness=found.staleness, pause_seconds=found.pause_seconds)


def _mode(
    split: NodeSplit, steps: AsyncSteps | None, ahead: float, name: str, seconds: float, waits: float, save: float
) -> Mode:
    config, fleet = split.config, split.fleet(steps)
    work = workload(config)
    wait = max(save - waits, 0.0) / config.trainer.save_interval
    step = seconds + wait
    return Mode(
        name=name,
        max_staleness=steps.max_staleness if steps else 0,
        train_nodes=split.train_nodes,
        num_engines=config.engine.num_engines,
        num_prefill_engines=config.engine.pd.num_prefill_engines,
        step_seconds=step,
        bound_seconds=seconds,
        checkpoint_seconds=wait,
        pause_seconds=0.0,
        trainer_idle=waits / step if config.engine.own_nodes else None,
        engines_idle=1 - busy_seconds(fleet, work, ahead) / step,
        staleness=0.0,
    )

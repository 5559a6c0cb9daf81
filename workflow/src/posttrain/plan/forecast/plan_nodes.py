"""Memory of each kind of node, and step times if engines share the trainer's nodes or have their own.

A split gives some nodes to training and the others to engines. Each is timed with the planner's layout and engines for
it, one phase after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from posttrain.config.derived import engine_nodes, is_off_policy, takes_turns, trainer_nodes, uses_engines
from posttrain.config.engine import PrefillDecode
from posttrain.config.schema import Config
from posttrain.plan.sizing.layout import best_fitting_layout
from posttrain.plan.sizing.layout_choice import choose_engine
from posttrain.plan.sizing.memory_phases import (
    PhaseMemory,
    capacity_gib,
    host_gib_by_phase,
    own_engine_memory,
    phase_memory,
)
from posttrain.plan.timing.step_time import IN_EVERY_STEP, state_fits, step_durations
from posttrain.readable import counted

# Splits are multiples of 1/PARTS of the nodes: finer ones would take longer and add little information.
PARTS = 4


class NoSplit(Exception):
    """The reason why engines cannot have the given number of nodes."""


def nodes_part(config: Config) -> list[dict[str, Any]]:
    """Return the kinds of nodes for `plan.json`, each with its fullest GPU; those with ranks first."""
    own = own_engine_memory(config)
    with_ranks = "trainer and engines" if uses_engines(config) and not own else "trainer"
    kinds = [_kind(config, with_ranks, trainer_nodes(config), phase_memory(config))]
    return kinds + ([_kind(config, "engines", len(engine_nodes(config)), own)] if own else [])


def _kind(config: Config, name: str, nodes: int, memory: list[PhaseMemory]) -> dict[str, Any]:
    fullest = max(memory, key=lambda item: item.gpu_gib)
    return {
        "kind": name,
        "nodes": nodes,
        "phase": fullest.phase,
        "gpu_gib": round(fullest.gpu_gib, 4),
        "gpu": {part: round(gib, 4) for part, gib in fullest.gpu.items()},
        "fits": fullest.gpu_gib <= capacity_gib(config),
        "host_gib_per_node": round(max(host_gib_by_phase(config, memory).values()), 4),
    }


def splits_part(config: Config, shared_storage: float) -> list[dict[str, Any]]:
    """Return the step time for each number of engine-only nodes, for `plan.json`.

    Args:
        config: The resolved configuration.
        shared_storage: Bytes per second.

    Returns:
        One row per split: "own_nodes", "train_nodes", "engines" as text, "seconds" of a step and of its phases, or
        "why" it is impossible. Empty without GPUs, engines or a second node.
    """
    if config.hardware.device != "cuda" or not uses_engines(config) or config.nodes == 1:
        return []
    parts = {round(part * config.nodes / PARTS) for part in range(1, PARTS)}
    tried = sorted({0, config.engine.own_nodes, *(parts & {*range(1, config.nodes)})})
    return [_row(config, own, shared_storage) for own in tried]


def _row(config: Config, own: int, shared_storage: float) -> dict[str, Any]:
    row = {"own_nodes": own, "train_nodes": config.nodes - own, "engines": None, "seconds": None, "why": None}
    row |= dict.fromkeys(IN_EVERY_STEP)
    try:
        planned = config if own == config.engine.own_nodes else _with_layout(_with_engines(config, own))
    except NoSplit as error:
        return row | {"why": str(error)}
    seconds = step_durations(planned, shared_storage)
    synchronous = ", synchronous" * (is_off_policy(config) and not is_off_policy(planned))
    return row | {
        "engines": f"{_described(planned)}{synchronous}",
        "seconds": seconds["step"],
        **{phase: seconds[f"step_{phase}"] for phase in IN_EVERY_STEP},
    }


def _with_engines(config: Config, own: int) -> Config:
    """Return the configuration with the planner's engines, each of which prefills and decodes.

    Raises:
        NoSplit: No engine can hold the model.
    """
    engine = dataclasses.replace(config.engine, own_nodes=own, sleep="auto", pd=PrefillDecode())
    if takes_turns(config) != (own == 0):  # other engines run ahead, or leave a tail
        rollout = dataclasses.replace(config.rollout, max_staleness=0, tail_fraction=0.0)
        config = dataclasses.replace(config, rollout=rollout)
    chosen = choose_engine(dataclasses.replace(config, engine=engine))
    if not chosen:
        raise NoSplit(f"no engine on {counted(own, 'node')} holds the weights and a response")
    gpus, count = chosen["engine.gpus_per_engine"], chosen["engine.num_engines"]
    return dataclasses.replace(config, engine=dataclasses.replace(engine, gpus_per_engine=gpus, num_engines=count))


def _with_layout(config: Config) -> Config:
    """Return the configuration with the planner's layout.

    Raises:
        NoSplit: No layout fits.
    """
    nodes = trainer_nodes(config)
    on_nodes = counted(nodes, "node")
    if not state_fits(config, nodes):
        raise NoSplit(f"weights, gradients and optimizer state do not fit on {on_nodes}")
    if not (best := best_fitting_layout(config)):
        raise NoSplit(f"no layout of the trainer fits on {on_nodes}")
    capacity = capacity_gib(config)
    if any(item.gpu_gib > capacity for item in own_engine_memory(config)):
        raise NoSplit("engines do not fit (engine.mem_fraction_static)")
    return dataclasses.replace(config, parallel=best.parallel)


def _described(config: Config) -> str:
    engine, prefills = config.engine, config.engine.pd.num_prefill_engines
    text = f"{engine.num_engines} x {counted(engine.gpus_per_engine, 'GPU')}"
    return text + (f", {prefills} x {engine.pd.gpus_per_prefill_engine} that prefill" if prefills else "")

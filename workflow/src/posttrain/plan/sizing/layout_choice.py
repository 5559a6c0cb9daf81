"""The planner's layout for a configuration without a recipe.

A recipe in `config/nodes` is used unchanged; for any other number of ranks the planner sets the best layout of
`sizing.layout`, and engines that can hold the model. Values from a file or `set=` are kept. If nothing works, the error
names the violated rules and the nearest requests that work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from posttrain.config.derived import room_for_engines, world_size
from posttrain.config.families import family_of
from posttrain.config.load import Chosen
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.layout import (
    LayoutProposal,
    best_fitting_layout,
    nearly_valid,
    propose_layouts,
    some_layout_fits,
    some_layout_is_valid,
)
from posttrain.readable import counted

# Upper limit of the search for a larger request: each number of nodes requires a search of its layouts.
LARGEST_NODES = 128
ENGINE_KEYS = ("engine.gpus_per_engine", "engine.num_engines")


def choose_layout(config: Config, origins: Mapping[str, str]) -> Chosen:
    """Return layout and engine sizes for a configuration without a recipe.

    Args:
        config: The configuration with the schema's default layout.
        origins: Keys that a layer has set; these are kept.
    """
    if config.engine.own_nodes >= config.nodes:
        return Chosen({})  # a rule refuses it
    if config.trainer.recompute_granularity == "auto":  # what a layout makes room for is chosen behind it
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, recompute_granularity="full"))
    engine = choose_engine(config) if not any(key in origins for key in ENGINE_KEYS) else {}
    if world_size(config) == 1:
        return Chosen(engine)
    config, pinned = _with_engine(config, engine), pinned_sizes(config, origins)
    if fitting := best_fitting_layout(config, pinned):
        return Chosen(_free_values(fitting.sizes, pinned) | engine)
    proposals = propose_layouts(config, pinned)
    if not proposals:
        sizes = dataclasses.asdict(nearly_valid(config, pinned).parallel)
        return Chosen(_free_values(sizes, pinned) | engine, (_no_layout(config, pinned),))
    best = proposals[0]
    problems = () if can_be_held(proposals) else (_too_large(config, proposals, pinned),)
    return Chosen(_free_values(best.sizes, pinned) | engine, problems)


def choose_engine(config: Config, known: dict[int, bool] | None = None) -> dict[str, int]:
    """Return the smallest engine that holds the weights and one of the longest requests, on all GPUs for engines.

    An engine spans whole nodes or part of one, and its GPUs share the experts evenly.

    Args:
        config: The configuration.
        known: Cache of engine size -> whether it fits, which does not depend on the number of nodes.

    Example:
        GLM-5 in FP8 on 24 nodes of H200: 12 engines of 16 GPUs.
    """
    if config.hardware.device == "cpu":
        return {}
    ranks, in_node = room_for_engines(config), config.hardware.gpus_per_node
    known = {} if known is None else known
    for gpus in _powers_of_two(ranks):
        is_placed = ranks % gpus == 0 and (in_node % gpus == 0 or gpus % in_node == 0)
        if not is_placed or config.model.architecture.n_routed_experts % gpus:
            continue
        chosen = {"engine.gpus_per_engine": gpus, "engine.num_engines": ranks // gpus}
        if gpus not in known:
            known[gpus] = _holds_a_request(_with_engine(config, chosen))
        if known[gpus]:
            return chosen
    return {}


def _holds_a_request(config: Config) -> bool:
    longest = config.rollout.max_response_tokens * (1 + ASSUMPTIONS.prompt_share)
    return (engine_memory(config).kv_tokens_per_gpu or 0) >= longest


def pinned_sizes(config: Config, origins: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes from a file or `set=`, by their keys in the section `parallel`."""
    sizes = dataclasses.asdict(config.parallel)
    return {name: size for name, size in sizes.items() if f"parallel.{name}" in origins}


def can_be_held(proposals: list[LayoutProposal]) -> bool:
    """Return whether any layout's weights, gradients and optimizer state fit, without estimated parts."""
    return any(proposal.held_gib <= proposal.capacity_gib for proposal in proposals)


def nearest_nodes(config: Config, works: Callable[[Config], bool]) -> list[int]:
    """Return the nearest smaller and larger numbers of nodes for which `works` holds, if any."""
    below = (count for count in range(config.nodes - 1, config.engine.own_nodes, -1))
    above = (count for count in range(config.nodes + 1, LARGEST_NODES + 1))
    engines: dict[int, bool] = {}
    found = (next((n for n in counts if works(_on_nodes(config, n, engines))), None) for counts in (below, above))
    return [count for count in found if count is not None]


def requests_that_fit(config: Config, pinned: Mapping[str, int]) -> str:
    """Describe the nearest requests with a fitting layout."""

    def fits(variant: Config) -> bool:
        return some_layout_fits(variant, pinned)

    counts = nearest_nodes(config, fits)
    found = [f"nodes={count}" for count in counts]
    found += [request for request in _offloaded_requests(config, fits) if request.split()[0] not in found]
    return "nearest that fit: " + "; ".join(found) if found else f"none up to {LARGEST_NODES} nodes: take larger GPUs"


def _offloaded_requests(config: Config, fits: Callable[[Config], bool]) -> Iterator[str]:
    has_fp32 = bool(family_of(config.model.architecture).fp32_names)
    if config.hardware.device == "cpu" or config.trainer.optimizer_cpu_offload or has_fp32:
        return
    offloaded = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, optimizer_cpu_offload=True))
    flag = "trainer.optimizer_cpu_offload=true"
    if fits(_on_nodes(offloaded, config.nodes, {})):
        yield flag
    else:
        yield from (f"nodes={count} with {flag}" for count in nearest_nodes(offloaded, fits))


def _no_layout(config: Config, pinned: Mapping[str, int]) -> Problem:
    counts = nearest_nodes(config, lambda variant: some_layout_is_valid(variant, pinned))
    nearest = ", ".join(map(str, counts)) or "none"
    allowed = f"a count for which {config.model.name} has a valid layout; the rules that fail are listed"
    return Problem("no-layout", "nodes", _request(config), allowed, f"nearest that work: {nearest}")


def _too_large(config: Config, proposals: list[LayoutProposal], pinned: Mapping[str, int]) -> Problem:
    least = min(proposal.held_gib for proposal in proposals)
    found = f"{_request(config)}: {least:.1f} GiB of weights, gradients and optimizer state per rank at best"
    allowed = f"at most {proposals[0].capacity_gib:g} GiB per rank ({config.hardware.name})"
    return Problem("trainer-exceeds-memory", "nodes", found, allowed, requests_that_fit(config, pinned))


def _request(config: Config) -> str:
    own = config.engine.own_nodes
    apart = f", engines on {counted(own, 'node')} of their own" if own else ""
    return f"{config.nodes} ({world_size(config)} ranks{apart})"


def _on_nodes(config: Config, nodes: int, engines: dict[int, bool]) -> Config:
    variant = dataclasses.replace(config, nodes=nodes)
    return _with_engine(variant, choose_engine(variant, engines))


def _with_engine(config: Config, values: Mapping[str, int]) -> Config:
    engine = dataclasses.replace(
        config.engine,
        gpus_per_engine=values.get("engine.gpus_per_engine", config.engine.gpus_per_engine),
        num_engines=values.get("engine.num_engines", config.engine.num_engines),
    )
    return dataclasses.replace(config, engine=engine)


def _free_values(sizes: Mapping[str, int], pinned: Mapping[str, int]) -> dict[str, int]:
    return {f"parallel.{name}": size for name, size in sizes.items() if name not in pinned}


def _powers_of_two(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2

"""Placement of engines, or parts of one engine, on nodes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import engine_nodes, uses_engines
from posttrain.config.schema import Config
from posttrain.plan.flags.sglang_flags import DECODE, PREFILL, UNIFIED, nodes_per_engine, world_size


@dataclass(frozen=True)
class EnginePart:
    """An engine's processes on one node.

    Args:
        index: Number of the engine in the run.
        node_rank: Rank of this node among the engine's nodes; rank 0 serves requests.
        first_node: Number of the engine's first node in the job.
        gpus: The engine's GPUs on this node; empty on CPUs.
        role: "unified", "prefill" or "decode".
    """

    index: int
    node_rank: int
    first_node: int
    gpus: tuple[int, ...]
    role: str = UNIFIED


def engines_on_node(config: Config, node: int) -> list[EnginePart]:
    """Return the engines of node number `node`, from 0.

    GPUs are assigned to engines in order, like trainer ranks; prefill engines come first, although their indices are
    the highest. Engines on CPUs are spread evenly, each over as many nodes as its ranks need. With `engine.own_nodes`,
    placement begins at the first of those nodes.

    Example:
        4 engines of 4 GPUs on 2 nodes of 8: engines 0 and 1 run on node 0. 4 engines on 4 nodes of CPUs: one each.
    """
    nodes = engine_nodes(config)
    if node not in nodes:
        return []
    count = config.engine.num_engines if uses_engines(config) else 0
    engines = _in_order_of_gpus(config, count)
    if config.hardware.device == "cpu":
        spanned = nodes_per_engine(config) if config.engine.kind == "sglang" else 1
        groups = len(nodes) // spanned
        firsts = [nodes[number * groups // len(engines) * spanned] for number in range(len(engines))]
        spread = zip(firsts, sorted(engines), strict=True)
        return [
            EnginePart(index, node - first, first, (), role)
            for first, (index, role) in spread
            if first <= node < first + spanned
        ]
    per_node, parts = config.hardware.gpus_per_node, []
    first = nodes.start * per_node
    for index, role in engines:
        first_node, place = divmod(first, per_node)
        if first_node <= node < first_node + nodes_per_engine(config, role):
            gpus = tuple(range(place, min(place + world_size(config, role), per_node)))
            parts.append(EnginePart(index, node - first_node, first_node, gpus, role))
        first += world_size(config, role)
    return parts


def _in_order_of_gpus(config: Config, count: int) -> list[tuple[int, str]]:
    """Return (index, role) of each engine in the order of their GPUs."""
    prefills = config.engine.pd.num_prefill_engines if count else 0
    first = [(count + index, PREFILL) for index in range(prefills)]
    return first + [(index, DECODE if prefills else UNIFIED) for index in range(count)]

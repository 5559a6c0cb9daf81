"""Which engines, or parts of one, run on which node. Pure arithmetic."""

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
        node_rank: Number of this node among those of the engine; the first one answers requests.
        first_node: Number of the engine's first node in the job.
        gpus: GPUs of this node that it has; none on CPUs.
        role: "unified", "prefill" or "decode".
    """

    index: int
    node_rank: int
    first_node: int
    gpus: tuple[int, ...]
    role: str = UNIFIED


def engines_on_node(config: Config, node: int) -> list[EnginePart]:
    """Return the engines of node number `node`, from 0.

    GPUs are given to engines one after the other, as trainer ranks are, to those that only prefill first; their numbers
    come after those of the others. Engines on CPUs are spread evenly, each on as many nodes as its ranks take. Where
    they have nodes of their own (`engine.own_nodes`), the first of these is the first that gets any.

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
    """Return number and role of each engine."""
    prefills = config.engine.pd.num_prefill_engines if count else 0
    first = [(count + index, PREFILL) for index in range(prefills)]
    return first + [(index, DECODE if prefills else UNIFIED) for index in range(count)]

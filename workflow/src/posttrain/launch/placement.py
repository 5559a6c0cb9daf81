"""Which engines, or parts of one, run on which node. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import uses_engines
from posttrain.config.schema import Config
from posttrain.planner.flags.sglang_flags import nodes_per_engine


@dataclass(frozen=True)
class EnginePart:
    """An engine's processes on one node.

    Args:
        index: Number of the engine in the run.
        node_rank: Number of this node among those of the engine; the first one answers requests.
        first_node: Number of the engine's first node in the job.
        gpus: GPUs of this node that it has; none on CPUs.
    """

    index: int
    node_rank: int
    first_node: int
    gpus: tuple[int, ...]


def engines_on_node(config: Config, node: int) -> list[EnginePart]:
    """Return the engines of node number `node`, from 0.

    GPUs are given to engines one after the other, as trainer ranks are; engines on CPUs are spread evenly.

    Example:
        4 engines of 4 GPUs on 2 nodes of 8: engines 0 and 1 run on node 0. 4 engines on 4 nodes of CPUs: one each.
    """
    count = config.engine.num_engines if uses_engines(config) else 0
    if config.hardware.device == "cpu":
        return [EnginePart(i, 0, node, ()) for i in range(count) if i * config.nodes // count == node]
    per_node, per_engine = config.hardware.gpus_per_node, config.engine.gpus_per_engine
    parts = []
    for index in range(count):
        first = index * per_engine
        first_node = first // per_node
        if first_node <= node < first_node + nodes_per_engine(config):
            place = first % per_node
            gpus = tuple(range(place, min(place + per_engine, per_node)))
            parts.append(EnginePart(index, node - first_node, first_node, gpus))
    return parts

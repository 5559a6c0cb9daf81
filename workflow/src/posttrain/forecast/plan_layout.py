"""The picture of a layout on the plan's page: every GPU on its node, coloured by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from posttrain.config.schema import Config
from posttrain.forecast.plan_figures import joined
from posttrain.planner.sizing.rank_order import RankPlace, engines_by_gpu, rank_places

# The parts of a layout: how they are called, the key of their size, and what they mean.
TERMS = (
    ("TP", "tensor_model_parallel_size", "tensor parallel: ranks that share each matrix of a layer"),
    ("PP", "pipeline_model_parallel_size", "pipeline parallel: stages of consecutive layers"),
    ("CP", "context_parallel_size", "context parallel: ranks that share a sequence"),
    ("EP", "expert_model_parallel_size", "expert parallel: ranks that share the experts of a layer"),
    ("ETP", "expert_tensor_parallel_size", "ranks that share each expert's matrices"),
    ("DP", "data_parallel_size", "data parallel: copies of the model, each with samples of its own"),
)


@dataclass(frozen=True)
class Cell:
    """One GPU: where its stage stands between the first (0) and the last (1), text, and what shows on hover."""

    shade: float
    text: str
    title: str


@dataclass(frozen=True)
class NodeBox:
    """One node: its name, the stages on it, its GPUs, and the engines that share them, "" for none."""

    name: str
    stages: str
    cells: tuple[Cell, ...]
    engines: str


def layout_picture(config: Config) -> list[NodeBox]:
    """Return the drawing of the configured layout: nodes x GPUs, with stage, ranks and engine of each."""
    per_node, engines, places = config.hardware.gpus_per_node, engines_by_gpu(config), rank_places(config)
    last = max(1, config.parallel.pipeline_model_parallel_size - 1)
    return [
        _node(number, places[number * per_node : (number + 1) * per_node], engines, last)
        for number in range(config.nodes)
    ]


def _node(number: int, places: Sequence[RankPlace], engines: Mapping[int, str], last_stage: int) -> NodeBox:
    names = dict.fromkeys(engines[place.rank] for place in places if place.rank in engines)
    return NodeBox(
        f"node {number}",
        joined("stage", sorted({place.stage for place in places})),
        tuple(_cell(place, engines, last_stage) for place in places),
        _joined_engines(list(names)),
    )


def _cell(place: RankPlace, engines: Mapping[int, str], last_stage: int) -> Cell:
    title = (
        f"rank {place.rank}: stage {place.stage}, tensor {place.tensor}, context {place.context}, "
        f"data {place.data}, expert {place.expert}; {engines.get(place.rank, 'no engine')}"
    )
    return Cell(round(place.stage / last_stage, 3), f"{place.tensor}·{place.context}·{place.data}", title)


def _joined_engines(names: Sequence[str]) -> str:
    """Return engines by role: "engines 0-3", "prefill 0"."""
    parts = [name.rsplit(" ", 1) for name in names]
    return ", ".join(
        joined(role, [int(number) for _, number in group]) for role, group in groupby(parts, key=lambda part: part[0])
    )

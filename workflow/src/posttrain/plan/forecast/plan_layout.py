"""The picture of a layout on the plan's page: every GPU on its node, coloured by pipeline stage.

Megatron numbers ranks with the tensor-parallel rank changing fastest, then context, data, pipeline; experts use the
same order with their own sizes: expert-tensor, expert, expert-data, pipeline
(`megatron.core.parallel_state.RankGenerator`, default order "tp-cp-ep-dp-pp"). So the ranks of a stage are neighbours,
and a tensor-parallel group is on one node if its size divides a node's GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from posttrain.config.derived import data_parallel_size, engine_nodes, trainer_nodes, uses_engines, world_size
from posttrain.config.schema import Config
from posttrain.plan.forecast.plan_figures import joined

# Dimensions of a layout: name, key of the size, meaning.
TERMS = (
    ("TP", "tensor_model_parallel_size", "tensor parallel: ranks that share each matrix of a layer"),
    ("PP", "pipeline_model_parallel_size", "pipeline parallel: stages of consecutive layers"),
    ("VPP", "virtual_pipeline_model_parallel_size", "interleaved stages: chunks of consecutive layers on each"),
    ("CP", "context_parallel_size", "context parallel: ranks that share a sequence"),
    ("EP", "expert_model_parallel_size", "expert parallel: ranks that share the experts of a layer"),
    ("ETP", "expert_tensor_parallel_size", "ranks that share each expert's matrices"),
    ("DP", "data_parallel_size", "data parallel: copies of the model, each with samples of its own"),
)


@dataclass(frozen=True)
class Cell:
    """One GPU: position of its stage between the first (0) and the last (1), text, and tooltip."""

    shade: float
    text: str
    title: str


@dataclass(frozen=True)
class NodeBox:
    """One node: name, its stages ("" without ranks), GPUs, and engines ("" for none)."""

    name: str
    stages: str
    cells: tuple[Cell, ...]
    engines: str


@dataclass(frozen=True)
class RankPlace:
    """One trainer rank.

    Args:
        rank: From 0, in the order of nodes and their GPUs.
        tensor: Index in its tensor-parallel group.
        context: Index in its context-parallel group.
        data: Index in its data-parallel group.
        stage: Pipeline stage.
        expert: Index in its expert-parallel group.
    """

    rank: int
    tensor: int
    context: int
    data: int
    stage: int
    expert: int


def rank_place(config: Config, rank: int) -> RankPlace:
    """Return the position of a rank in all groups.

    Example:
        GLM-5 on 16 nodes, TP4 PP4 CP2 EP32 ETP1: rank 37 is tensor 1, context 1, data 0, stage 1, expert 5.
    """
    parallel = config.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    expert_tensor, expert = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    data = data_parallel_size(config)
    return RankPlace(
        rank=rank,
        tensor=rank % tensor,
        context=rank // tensor % context,
        data=rank // (tensor * context) % data,
        stage=rank // (tensor * context * data),
        expert=rank // expert_tensor % expert,
    )


def rank_places(config: Config) -> list[RankPlace]:
    """Return every rank's position, in the order of ranks."""
    return [rank_place(config, rank) for rank in range(world_size(config))]


def engines_by_gpu(config: Config) -> dict[int, str]:
    """Return GPU -> its engine while engines are awake; GPUs without an engine are omitted.

    Engines use consecutive GPUs, prefill engines first, starting at the job's first GPU or at the first one reserved
    for engines.

    Example:
        One prefill and one decode engine of 64 GPUs: 0 to 63 are "prefill 0", 64 to 127 "decode 0".
    """
    first = engine_nodes(config).start * config.hardware.gpus_per_node
    return dict(enumerate(_engine_of_each_gpu(config), start=first))


def _engine_of_each_gpu(config: Config) -> Iterator[str]:
    engine = config.engine
    if not uses_engines(config):
        return
    prefills = engine.pd.num_prefill_engines
    for index in range(prefills):
        yield from [f"prefill {index}"] * engine.pd.gpus_per_prefill_engine
    for index in range(engine.num_engines):
        yield from [f"{'decode' if prefills else 'engine'} {index}"] * engine.gpus_per_engine


def layout_picture(config: Config) -> list[NodeBox]:
    """Return the picture of the configured layout: nodes x GPUs, each with stage, ranks and engine."""
    per_node, engines, places = config.hardware.gpus_per_node, engines_by_gpu(config), rank_places(config)
    last = max(1, config.parallel.pipeline_model_parallel_size - 1)
    with_ranks = [
        _node(number, places[number * per_node : (number + 1) * per_node], engines, last)
        for number in range(trainer_nodes(config))
    ]
    return with_ranks + [_engine_node(config, number, engines) for number in range(len(with_ranks), config.nodes)]


def _engine_node(config: Config, number: int, engines: Mapping[int, str]) -> NodeBox:
    per_node = config.hardware.gpus_per_node
    names = [engines.get(gpu, "") for gpu in range(number * per_node, (number + 1) * per_node)]
    cells = tuple(Cell(0.0, "", f"no rank; {name or 'no engine'}") for name in names)
    return NodeBox(f"node {number}", "", cells, _joined_engines([*dict.fromkeys(filter(None, names))]))


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

"""The picture of a layout on the plan's page: every GPU on its node, coloured by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from posttrain.config.schema import Config
from posttrain.planner.rank_order import RankPlace, engines_by_gpu, rank_places

WIDTH = 1160
CELL_WIDTH, CELL_HEIGHT, CELLS_PER_ROW = 31, 20, 4
MARGIN, TITLE_HEIGHT, BAND_HEIGHT = 6, 18, 17
# The page's palette has seven colours; stages take them in turn, and each node's title names its stages.
NUM_COLORS = 7


@dataclass(frozen=True)
class Cell:
    """One GPU: its corner in the drawing's units, colour, text, and what shows on hover."""

    x: float
    y: float
    color: int
    text: str
    title: str


@dataclass(frozen=True)
class NodeBox:
    """One node.

    Args:
        x: Left edge.
        y: Upper edge.
        title: Its number and the stages on it.
        cells: Its GPUs.
        engines: The engines that share its GPUs, "" for none.
    """

    x: float
    y: float
    title: str
    cells: tuple[Cell, ...]
    engines: str


@dataclass(frozen=True)
class LayoutPicture:
    """The nodes of a layout, in rows.

    Args:
        nodes: Every node.
        node_width: Of a node's box.
        node_height: Of a node's box.
        height: Of the drawing.
    """

    nodes: tuple[NodeBox, ...]
    node_width: float
    node_height: float
    height: float


def layout_picture(config: Config) -> LayoutPicture:
    """Return the drawing of the configured layout: nodes x GPUs, with stage, ranks and engine of each."""
    per_node, engines = config.hardware.gpus_per_node, engines_by_gpu(config)
    columns, rows = min(per_node, CELLS_PER_ROW), -(-per_node // CELLS_PER_ROW)
    # A node with a single GPU still has room for its title.
    width = max(columns, 3) * CELL_WIDTH + 2 * MARGIN
    height = TITLE_HEIGHT + rows * CELL_HEIGHT + BAND_HEIGHT + MARGIN
    per_line = max(1, WIDTH // (width + MARGIN))
    nodes = []
    places = rank_places(config)
    for number in range(config.nodes):
        line, place_in_line = divmod(number, per_line)
        x, y = place_in_line * (width + MARGIN), line * (height + MARGIN)
        nodes.append(_node(number, places[number * per_node : (number + 1) * per_node], engines, x, y))
    lines = -(-len(nodes) // per_line)
    return LayoutPicture(tuple(nodes), width, height, lines * (height + MARGIN))


def _node(number: int, places: Sequence[RankPlace], engines: Mapping[int, str], x: float, y: float) -> NodeBox:
    cells = tuple(_cell(place, index, engines, x, y) for index, place in enumerate(places))
    stages = _joined("stage", sorted({place.stage for place in places}))
    names = dict.fromkeys(engines[place.rank] for place in places if place.rank in engines)
    return NodeBox(x, y, f"node {number}, {stages}", cells, _joined_engines(list(names)))


def _cell(place: RankPlace, index: int, engines: Mapping[int, str], x: float, y: float) -> Cell:
    row, column = divmod(index, CELLS_PER_ROW)
    title = (
        f"rank {place.rank}: stage {place.stage}, tensor {place.tensor}, context {place.context}, "
        f"data {place.data}, expert {place.expert}; {engines.get(place.rank, 'no engine')}"
    )
    return Cell(
        x=x + MARGIN + column * CELL_WIDTH,
        y=y + TITLE_HEIGHT + row * CELL_HEIGHT,
        color=place.stage % NUM_COLORS + 1,
        text=f"{place.tensor}·{place.context}·{place.data}",
        title=title,
    )


def _joined_engines(names: Sequence[str]) -> str:
    """Return engines by role: "engines 0-3", "prefill 0"."""
    parts = [name.rsplit(" ", 1) for name in names]
    return ", ".join(
        _joined(role, [int(number) for _, number in group]) for role, group in groupby(parts, key=lambda part: part[0])
    )


def _joined(what: str, numbers: Sequence[int]) -> str:
    """Return "stage 3", or "stages 3-5" for a range of neighbours."""
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]}-{numbers[-1]}"

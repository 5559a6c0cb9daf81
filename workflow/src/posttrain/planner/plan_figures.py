"""Bars of the plan's page: memory of a stage's rank in each phase, against the memory that there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Parts of memory in the order of the bars: label, colour of the page's palette, what belongs to it.
GROUPS = (
    ("weights", 1, ("weights",)),
    ("gradients", 2, ("gradients",)),
    ("optimizer", 3, ("optimizer",)),
    ("work of the phase", 4, ("activations", "dispatch", "logprobs", "fragmentation", "sync_bucket", "save_staging")),
    ("engine weights", 5, ("engine_weights", "engine_work")),
    ("KV pool", 6, ("kv_pool",)),
    ("reserve", 7, ("reserve",)),
)
WIDTH = 1160
LABEL_WIDTH = 96
ROW_HEIGHT = 20


@dataclass(frozen=True)
class Segment:
    """A part of a bar, in the drawing's units; `title` shows on hover."""

    x: float
    width: float
    color: int
    title: str


@dataclass(frozen=True)
class Bar:
    """The memory of one phase.

    Args:
        phase: Its name.
        y: Upper edge.
        segments: From left to right.
        end: Right edge.
        gib: Their sum.
        fits: It is at most the capacity.
    """

    phase: str
    y: float
    segments: tuple[Segment, ...]
    end: float
    gib: float
    fits: bool


@dataclass(frozen=True)
class StageBars:
    """One stage's drawing.

    Args:
        stage: Its number.
        bars: One per phase.
        capacity_x: Where the capacity's line stands.
        height: Of the drawing.
        is_fullest: No stage has a fuller phase.
    """

    stage: int
    bars: tuple[Bar, ...]
    capacity_x: float
    height: float
    is_fullest: bool


def stage_bars(trainer: Mapping[str, Any]) -> list[StageBars]:
    """Return the drawing of every stage.

    Args:
        trainer: `plan.json`'s "trainer".
    """
    phases, capacity = trainer["phases"], trainer["capacity_gib"]
    fullest = max(phases, key=lambda item: item["gpu_gib"])
    # Room for the figure behind the longest bar.
    scale = (WIDTH - LABEL_WIDTH - 140) / max(capacity, fullest["gpu_gib"])
    stages = sorted({item["stage"] for item in phases})
    return [
        StageBars(
            stage,
            bars := _bars([item for item in phases if item["stage"] == stage], capacity, scale),
            LABEL_WIDTH + scale * capacity,
            ROW_HEIGHT * len(bars) + 4,
            stage == fullest["stage"],
        )
        for stage in stages
    ]


def _bars(phases: Sequence[Mapping[str, Any]], capacity: float, scale: float) -> tuple[Bar, ...]:
    bars = []
    for row, item in enumerate(phases):
        segments, x = [], float(LABEL_WIDTH)
        for label, color, parts in GROUPS:
            gib = sum(item["gpu"].get(part, 0.0) for part in parts)
            if gib > 0:
                segments.append(Segment(round(x, 2), round(scale * gib, 2), color, f"{label}: {gib:.3g} GiB"))
            x += scale * gib
        fits = item["gpu_gib"] <= capacity
        bars.append(Bar(item["phase"], 4.0 + ROW_HEIGHT * row, tuple(segments), round(x, 2), item["gpu_gib"], fits))
    return tuple(bars)

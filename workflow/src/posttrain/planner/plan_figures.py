"""What the plan's page draws and lists: memory of a stage's rank in each phase, and the flags of each program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
READERS = {
    "megatron.model": "MLATransformerConfig",
    "megatron.ddp": "DistributedDataParallelConfig",
    "megatron.optimizer": "OptimizerConfig",
    "trainer.env": "environment of the trainer",
    "embedded": "arguments of the embedded engine",
}
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


def flag_groups(flags: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the flags that programs get, by the program that reads them.

    Args:
        flags: `plan.json`'s "flags"; values of the configuration, which have no "keys", are left out.

    Returns:
        Groups of "reader", "what" it is, and "rows": "name", "value" as text, "origin", "keys", "reason".
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, item in flags.items():
        if "keys" in item:
            reader, _, name = key.partition(" ")
            groups.setdefault(reader, []).append({**item, "name": name, "value": _as_text(item["value"])})
    return [{"reader": reader, "what": _what_reads(reader), "rows": rows} for reader, rows in groups.items()]


def _what_reads(reader: str) -> str:
    if reader in READERS:
        return READERS[reader]
    part = reader.partition(".")[2]
    engine = "an engine" if part in ("", "env") else f"a {part.removesuffix('.env')} engine"
    return f"environment of {engine}" if part.endswith("env") else f"command line of {engine}"


def _as_text(value: Any) -> str:
    """Return a value as text; a list tells runs of equal items: "3 x 0, 75 x 1"."""
    if not isinstance(value, list | tuple):
        return value if isinstance(value, str) else json.dumps(value)
    runs = [(len(list(run)), item) for item, run in groupby(value)]
    return ", ".join(f"{length} x {_as_text(item)}" if length > 1 else _as_text(item) for length, item in runs)

"""Figures and lists of the plan's page: memory of a stage's rank in each phase, and the flags of each program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from posttrain.readable import as_text

# Parts of memory in the order of the bars: label, colour of the page's palette, members.
GROUPS = (
    ("weights", 1, ("weights",)),
    ("gradients", 2, ("gradients",)),
    ("optimizer", 3, ("optimizer",)),
    (
        "work of the phase",
        4,
        (
            *("activations", "dispatch", "logprobs", "kernels", "fragmentation"),
            *("served_layer", "sync_bucket", "sync_changes", "sent_weights", "save_staging"),
        ),
    ),
    ("engine weights", 5, ("engine_weights", "engine_work", "engine_routes")),
    ("KV pool", 6, ("kv_pool",)),
    ("reserve", 7, ("reserve",)),
)
READERS = {
    "megatron.model": "MLATransformerConfig",
    "megatron.ddp": "DistributedDataParallelConfig",
    "megatron.optimizer": "OptimizerConfig",
    "trainer.env": "environment of the trainer",
    "embedded": "arguments of the embedded engine",
}


@dataclass(frozen=True)
class Segment:
    """A part of a bar; `percent` is relative to the longest bar, `title` is the tooltip."""

    percent: float
    color: int
    title: str


@dataclass(frozen=True)
class Bar:
    """The memory of one phase."""

    phase: str
    segments: tuple[Segment, ...]
    gib: float
    fits: bool
    surely_fits: bool


@dataclass(frozen=True)
class StageGroup:
    """Adjacent stages with the same contents.

    Args:
        name: "stage 0", "stages 1-10".
        held: `plan.json`'s row of one stage's persistent memory.
        bars: One per phase, for the stage that needs the most: the earlier one, which keeps activations longer.
        is_fullest: Whether no other group has a fuller phase.
    """

    name: str
    held: Mapping[str, Any]
    bars: tuple[Bar, ...]
    is_fullest: bool


def stage_groups(trainer: Mapping[str, Any]) -> list[StageGroup]:
    """Return the memory of all stages, with equal neighbours grouped.

    Args:
        trainer: `plan.json`'s "trainer".
    """
    phases = trainer["phases"]
    fullest = max(phases, key=lambda item: item["gpu_gib"])
    longest = max(trainer["capacity_gib"], fullest["gpu_gib"])
    groups = []
    for _, run in groupby(trainer["stages"], key=lambda held: {**held, "stage": None}):
        stages = [*run]
        numbers = [held["stage"] for held in stages]
        bars = []
        for phase in dict.fromkeys(item["phase"] for item in phases):
            of_group = [item for item in phases if item["phase"] == phase and item["stage"] in numbers]
            bars.append(_bar(max(of_group, key=lambda item: item["gpu_gib"]), longest))
        groups.append(StageGroup(joined("stage", numbers), stages[0], tuple(bars), fullest["stage"] in numbers))
    return groups


def _bar(item: Mapping[str, Any], longest: float) -> Bar:
    amounts = [(label, color, sum(item["gpu"].get(part, 0.0) for part in parts)) for label, color, parts in GROUPS]
    segments = tuple(
        Segment(round(100 * gib / longest, 3), color, f"{label}: {gib:.3g} GiB") for label, color, gib in amounts if gib
    )
    return Bar(item["phase"], segments, item["gpu_gib"], item["fits"], item["surely_fits"])


def joined(what: str, numbers: Sequence[int]) -> str:
    """Return "stage 3", or "stages 3-5" for a range."""
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]}-{numbers[-1]}"


def flag_groups(flags: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the programs' flags, grouped by the program that reads them.

    Args:
        flags: `plan.json`'s "flags"; configuration values, which have no "keys", are omitted.

    Returns:
        Groups with "reader", its description "what", and "rows": "name", "value" as text, "origin", "keys", "reason".
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, item in flags.items():
        if "keys" in item:
            reader, _, name = key.partition(" ")
            groups.setdefault(reader, []).append({**item, "name": name, "value": as_text(item["value"])})
    return [{"reader": reader, "what": _what_reads(reader), "rows": rows} for reader, rows in groups.items()]


def _what_reads(reader: str) -> str:
    if reader in READERS:
        return READERS[reader]
    part = reader.partition(".")[2]
    engine = "an engine" if part in ("", "env") else f"a {part.removesuffix('.env')} engine"
    return f"environment of {engine}" if part.endswith("env") else f"command line of {engine}"

"""Reads the queue of trajectory groups between engines and trainer from a run's files, without writing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.store import read_json

AGE, DROPPED = "queue/age_", "queue/dropped_"


@dataclass(frozen=True)
class QueueStatus:
    """The queue of one run.

    Args:
        num_ready: Finished groups that wait on disk for a step.
        num_running: Groups that engines generated when the last step took its own; None before the first.
        ages: Age in updates -> share of the tokens that the last step trained on.
        dropped: Reason -> groups dropped by all steps.
    """

    num_ready: int
    num_running: int | None
    ages: dict[int, float]
    dropped: dict[str, int]


def read_queue(train: Path, rows: Sequence[dict[str, float]], checkpoint: int) -> QueueStatus | None:
    """Return the state of a run's queue; None if it has none.

    Args:
        train: The training run's folder.
        rows: Its metrics.
        checkpoint: Finished steps of its newest checkpoint.
    """
    folder, last = train / "rollouts/queue", rows[-1] if rows else {}
    if not folder.exists() and not any(name.startswith("queue/") for name in last):
        return None
    running = last.get("queue/groups_running")
    reasons = {name.removeprefix(DROPPED) for row in rows for name in row if name.startswith(DROPPED)}
    return QueueStatus(
        num_ready=_num_ready(folder, checkpoint),
        num_running=None if running is None else int(running),
        ages={int(name.removeprefix(AGE)): last[name] for name in sorted(last) if name.startswith(AGE)},
        dropped={
            reason: int(math.fsum(row.get(f"{DROPPED}{reason}", 0.0) for row in rows)) for reason in sorted(reasons)
        },
    )


def _num_ready(folder: Path, checkpoint: int) -> int:
    """Count the stored groups that no step has taken: a kill may leave a group's file after a step has taken it."""
    ready = {_number(path) for path in folder.glob("group_*.json")}
    for path in sorted(folder.glob("done_*.json"), reverse=True):
        # The record of a step is written before its chunk, which takes the groups and goes with a later checkpoint.
        step = _number(path) - 1
        if step < checkpoint or (folder.parent / f"step_{step:06d}/chunk_0000.json").exists():
            with contextlib.suppress(FileNotFoundError):  # a checkpoint that was committed just now has deleted it
                done = read_json(path)
                return sum(position >= done["first_open"] for position in ready - {*done["others"]})
    return len(ready)


def _number(path: Path) -> int:
    """Return the number in a file's name."""
    return int(path.stem.partition("_")[2])

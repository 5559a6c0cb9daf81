"""Serialises a rollout for the broadcast from rank 0: JSON types, with long arrays as base64 text.

As plain JSON numbers, sixteen million tokens would keep every rank waiting for half a minute.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable
from typing import Any

from posttrain.types import RolloutResult, TrajectoryGroup

# Array field of a trajectory -> C type of its numbers. The loss mask is already a text.
ROWS = {"tokens": "q", "logprobs": "d"}


def as_plain(rollout: RolloutResult) -> dict[str, Any]:
    """Return a rollout as JSON types."""
    return vars(rollout) | {"groups": [_each(group.as_dict(), _pack) for group in rollout.groups]}


def from_plain(content: dict[str, Any]) -> RolloutResult:
    """Return the rollout that `as_plain` serialised, bit for bit."""
    groups = [TrajectoryGroup.from_dict(_each(group, _unpack)) for group in content["groups"]]
    return RolloutResult(**content | {"groups": groups})


def _each(group: dict[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a group with the array fields of its trajectories converted."""
    trajectories = [
        one | {name: convert(kind, one[name]) for name, kind in ROWS.items()} for one in group["trajectories"]
    ]
    return group | {"trajectories": trajectories}


def _pack(kind: str, row: tuple[float, ...]) -> str:
    return base64.b64encode(array(kind, row).tobytes()).decode()


def _unpack(kind: str, row: str) -> tuple[float, ...]:
    return tuple(array(kind, base64.b64decode(row)))

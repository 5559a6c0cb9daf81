"""Serialises a rollout for the broadcast from rank 0: JSON types, with long arrays as base64 text.

As plain JSON numbers, sixteen million tokens would keep every rank waiting for half a minute.
"""

from __future__ import annotations

import base64
from array import array
from typing import Any

from posttrain.types import Prompt, RolloutResult, Routes, Sample, SampleGroup

# Array field of a sample -> C type of its numbers.
ROWS = {"prompt_tokens": "q", "response_tokens": "q", "rollout_logprobs": "d"}


def as_plain(rollout: RolloutResult) -> dict[str, Any]:
    """Return a rollout as JSON types."""
    groups = [
        {"prompt": group.prompt.as_dict(), "samples": [_packed(sample) for sample in group.samples]}
        for group in rollout.groups
    ]
    return vars(rollout) | {"groups": groups}


def from_plain(content: dict[str, Any]) -> RolloutResult:
    """Return the rollout that `as_plain` serialised, bit for bit."""
    groups = [
        SampleGroup(Prompt.from_dict(group["prompt"]), tuple(_unpacked(sample) for sample in group["samples"]))
        for group in content["groups"]
    ]
    return RolloutResult(**content | {"groups": groups})


def _packed(sample: Sample) -> dict[str, Any]:
    rows = {name: array(kind, getattr(sample, name)).tobytes() for name, kind in ROWS.items()}
    routes = sample.routes and vars(sample.routes)
    return (
        vars(sample) | {"routes": routes} | {name: base64.b64encode(content).decode() for name, content in rows.items()}
    )


def _unpacked(content: dict[str, Any]) -> Sample:
    rows = {name: tuple(array(kind, base64.b64decode(content[name]))) for name, kind in ROWS.items()}
    return Sample(**content | rows | {"routes": Routes.from_dict(content["routes"])})

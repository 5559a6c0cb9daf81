"""Leases as processes on other hosts leave them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from posttrain.store.lease import Holder


def plant(folder: Path, holder: Holder, heartbeat_unix: float | None = None) -> Path:
    """Leave an epoch as another process has it; returns its heartbeat."""
    folder.mkdir(exist_ok=True)
    (folder / f"epoch-{holder.epoch:06d}.json").write_text(json.dumps(dataclasses.asdict(holder)))
    heartbeat = folder / f"epoch-{holder.epoch:06d}.heartbeat"
    if heartbeat_unix is not None:
        heartbeat.touch()
        os.utime(heartbeat, (heartbeat_unix, heartbeat_unix))
    return heartbeat


def elsewhere(epoch: int = 1, **more: object) -> Holder:
    row = {"epoch": epoch, "host": "elsewhere", "pid": 7, "process_ids": "x", "started_ticks": 5, "user": "ada"}
    return Holder(**{**row, "since_unix": 1.0, **more})

"""A resolved configuration on disk: written once, when a command is given, and read by all its jobs.

Its name is its content's digest, so that a job that waits in a queue sees what was planned, whatever has become of
`config/` by then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from posttrain.artifacts.durable import write_text
from posttrain.config import schema
from posttrain.config.fields import build
from posttrain.config.load import Resolved, leaves_of


def write_resolved(resolved: Resolved, folder: Path) -> Path:
    """Write a configuration unless it is there; returns the file."""
    text = json.dumps(dataclasses.asdict(resolved), indent=1) + "\n"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def read_resolved(path: Path) -> Resolved:
    """Read what `write_resolved` wrote.

    Raises:
        RuntimeError: Another version of this workflow has written it.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        config = build(schema.Config, leaves_of(content["config"]))
        return Resolved(**content | {"config": config})
    except (KeyError, TypeError) as error:
        raise RuntimeError(f"{path}: not a configuration of this version ({error}); give the command again") from error

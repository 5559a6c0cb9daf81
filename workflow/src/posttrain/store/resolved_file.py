"""A resolved configuration on disk: written once, at the start of a command, and read by all its jobs.

Its name is the digest of its content, so a job that waited in a queue reads what was planned, even if `config/` has
changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from posttrain.config import schema
from posttrain.config.fields import build, leaves_of
from posttrain.config.load import Resolved
from posttrain.errors import CheckpointError
from posttrain.store.durable import write_text


def write_resolved(resolved: Resolved, folder: Path) -> Path:
    """Write a configuration unless it already exists, and return the file."""
    content = (json.dumps(dataclasses.asdict(resolved), indent=1) + "\n").encode()
    path = folder / _name_of(content)
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content.decode())
    return path


def read_resolved(path: Path) -> Resolved:
    """Read what `write_resolved` wrote.

    Raises:
        CheckpointError: The file is missing, was changed, or belongs to another version of this workflow.
    """
    try:
        content = path.read_bytes()
        if path.name != _name_of(content):
            raise ValueError("it was changed after it was written")
        values = json.loads(content)
        config = build(schema.Config, leaves_of(values["config"]))
        return Resolved(**values | {"config": config})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "resolved-config-invalid", f"{path}: not what a command has resolved ({error}); give the command again"
        ) from error


def _name_of(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:16]}.json"

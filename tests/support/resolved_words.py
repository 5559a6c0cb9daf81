"""The words with which a script of the workflow is given its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve
from posttrain.store.resolved_file import write_resolved

FOLDER = Path(tempfile.gettempdir(), f"posttrain-tests-{os.getuid()}")
CONFIG_DIR = Path(__file__).parents[2] / "config"


def resolved_words(workflow: Mapping[str, Any], folder: Path) -> list[str]:
    """Resolve as the Snakefile does in `folder`, write the file there, and return the words."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):  # runs that lie elsewhere are none of its
        resolved = resolve(workflow, CONFIG_DIR)
    return ["--resolved", str(write_resolved(resolved, folder / "configs"))]


def words_with(architecture: Architecture | None = None, **changes: Mapping[str, Any]) -> list[str]:
    """Return the words for a script that is to make something else than the tiny model has; nothing of it is checked.

    The file lies on none of the disks that tests break; its name is its content's digest.

    Args:
        architecture: Another model's.
        changes: Section -> values of it.
    """
    resolved = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR)
    config = resolved.config
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    model = sections.pop("model", config.model)
    model = dataclasses.replace(model, architecture=architecture or config.model.architecture)
    config = dataclasses.replace(config, model=model, **sections)
    return ["--resolved", str(write_resolved(dataclasses.replace(resolved, config=config), FOLDER))]

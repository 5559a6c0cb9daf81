"""The words with which a script of the workflow is given its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.resolved_file import write_resolved
from posttrain.planner.resolve import resolve

CONFIG_DIR = Path(__file__).parents[2] / "config"


def resolved_words(workflow: Mapping[str, Any], folder: Path) -> list[str]:
    """Resolve as the Snakefile does in `folder`, write the file there, and return the words."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):  # runs that lie elsewhere are none of its
        resolved = resolve(workflow, CONFIG_DIR)
    return ["--resolved", str(write_resolved(resolved, folder / "configs"))]

"""The words with which a script of the workflow is given its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.resolved_file import write_resolved
from posttrain.planner.layout_choice import resolve

CONFIG_DIR = Path(__file__).parents[1] / "config"


def resolved_words(workflow: Mapping[str, Any], folder: Path) -> list[str]:
    """Resolve as the Snakefile does, write the file below `folder`, and return the words."""
    return ["--resolved", str(write_resolved(resolve(workflow, CONFIG_DIR), folder / "configs"))]

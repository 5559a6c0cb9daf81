"""Finds the parts of a policy-gradient algorithm: one file each, in a folder per kind. Imports no torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def part_names(kind: str) -> tuple[str, ...]:
    """Return the names of all parts of a kind (a folder of this package).

    Example:
        part_names("aggregation") begins with "constant".
    """
    return tuple(sorted(path.stem for path in (Path(__file__).parent / kind).glob("[a-z]*.py")))


def load_part(kind: str, name: str) -> Any:
    """Return the module of a part."""
    return import_module(f"posttrain.rl.algorithm.{kind}.{name}")

"""Module names of version 0.2, whose jobs and documentation still use them with `python -m`.

The next version removes this file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
MOVED = {
    "posttrain.engines": "posttrain/rl/engines",
    "posttrain.foreign": "posttrain_import",
    "posttrain.launch": "posttrain/cluster",
    "posttrain.preflight": "posttrain/plan/preflight",
    "posttrain.processes": "posttrain/cluster/processes.py",
    "posttrain.reward": "posttrain/rl/reward",
}


class MovedModules:
    """Finds a moved package under its old name; its submodules are then found in the package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a moved module, or None if it has not moved."""
        if name not in MOVED:
            return None
        place = SOURCE / MOVED[name]
        if place.suffix:
            return spec_from_file_location(name, place)
        return spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])


def find_moved_modules() -> None:
    """Install the finder, once per process."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.append(MovedModules)  # type: ignore[arg-type]

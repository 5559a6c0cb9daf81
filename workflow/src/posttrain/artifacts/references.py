"""Who uses what of a shared store: one small file per run, written whenever a driver starts.

A reference counts as long as the run's folder exists, and for some days after the last start where it does not: a run
has no folder before its first step. A folder on a file system that is not mounted here counts as existing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts.durable import write_json
from posttrain.artifacts.lease import user_name
from posttrain.artifacts.paths import Paths
from posttrain.config.load import digest8

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Reference:
    """One run's use of the store.

    Args:
        run: The run's folder, absolute.
        results: The folder that holds it and other runs.
        user: Whose run it is.
        host: Where its driver was started last.
        last_start_unix: When.
        artefacts: What it uses, relative to the store.
    """

    run: str
    results: str
    user: str
    host: str
    last_start_unix: float
    artefacts: tuple[str, ...]

    def is_live(self, unused_days: float) -> bool:
        """Tell whether what it names must be kept."""
        if os.path.isdir(self.run) or not os.path.isdir(self.results):
            return True
        return time.time() - self.last_start_unix < unused_days * SECONDS_PER_DAY


def references_folder(store: Path) -> Path:
    """Return where a store keeps its users."""
    return store / "users"


def register_run(paths: Paths) -> None:
    """Say in the store what a run uses of it."""
    run, results = os.path.abspath(paths.run), os.path.abspath(paths.run.parent)
    used = [path.relative_to(paths.store).as_posix() for path in paths.store_artefacts.values()]
    reference = Reference(run, results, user_name(), socket.gethostname(), round(time.time(), 3), tuple(used))
    path = references_folder(paths.store) / f"{paths.run.name}-{digest8(run)}.json"
    write_json(path, dataclasses.asdict(reference))


def read_references(store: Path) -> dict[Path, Reference]:
    """Return all references to a store, each with its file."""
    rows = {path: json.loads(path.read_text(encoding="utf-8")) for path in references_folder(store).glob("*.json")}
    return {path: Reference(**{**row, "artefacts": tuple(row["artefacts"])}) for path, row in sorted(rows.items())}

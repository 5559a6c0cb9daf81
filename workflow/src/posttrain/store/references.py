"""References into a shared store: one small file per run, written whenever a driver starts.

A reference is live as long as the run's folder exists and, because a run has no folder before its first step, for some
days after the last start. A folder on a file system that is not mounted here counts as existing, and so does one
without read permission: only an explicit "not found" proves that a folder is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.load import digest8
from posttrain.errors import CheckpointError
from posttrain.store.durable import write_json
from posttrain.store.group_permissions import shared
from posttrain.store.names import RelativeName
from posttrain.store.paths import Paths
from posttrain.store.plain_json import read_json
from posttrain.store.processes import user_name

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Reference:
    """One run's use of the store.

    Args:
        run: The run's folder, absolute.
        results: The folder that holds it and other runs.
        user: Owner of the run.
        host: Host of the driver's last start.
        last_start_unix: Time of the driver's last start.
        artefacts: Artefacts that the run uses, relative to the store.
    """

    run: str
    results: str
    user: str
    host: str
    last_start_unix: float
    artefacts: tuple[RelativeName, ...]

    def __post_init__(self) -> None:
        os.fspath(self.run), os.fspath(self.results)  # `open` takes a number for a file descriptor
        object.__setattr__(self, "artefacts", tuple(RelativeName(name) for name in self.artefacts))

    def is_live(self, unused_days: float) -> bool:
        """Return whether the referenced artefacts must be kept."""
        if not is_gone(self.run) or is_gone(self.results):
            return True
        return time.time() - self.last_start_unix < unused_days * SECONDS_PER_DAY


def is_gone(path: str) -> bool:
    """Return whether a path certainly does not exist; a missing permission or a failing disk does not prove that."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def references_folder(store: Path) -> Path:
    """Return the folder of a store's references."""
    return store / "users"


def register_run(paths: Paths) -> None:
    """Record in the store which artefacts a run uses."""
    run, results = os.path.abspath(paths.run), os.path.abspath(paths.run.parent)
    folders = (*paths.store_artefacts.values(), paths.export_fp8)
    used = [RelativeName(path.relative_to(paths.store).as_posix()) for path in folders]
    reference = Reference(run, results, user_name(), socket.gethostname(), round(time.time(), 3), tuple(used))
    path = references_folder(paths.store) / f"{paths.run.name}-{digest8(run)}.json"
    with shared(path):
        write_json(path, dataclasses.asdict(reference))


def read_references(store: Path) -> dict[Path, Reference]:
    """Return all references to a store, each with its file.

    Raises:
        CheckpointError: A reference is damaged, so the artefacts it protects are unknown.
        OSError: A reference exists but cannot be read.
    """
    folder = references_folder(store)
    if is_gone(str(folder)):
        return {}
    found = {}
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".json")):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            found[folder / name] = _read(folder / name)
    return found


def _read(path: Path) -> Reference:
    try:
        reference = Reference(**read_json(path))
        reference.is_live(0.0)
    except (ValueError, TypeError) as error:
        remedy = "delete it when its run is gone; start its run again when it is not"
        raise CheckpointError(
            "reference-invalid", f"{path}: does not say what a run needs ({error})\n  remedy: {remedy}"
        ) from error
    return reference

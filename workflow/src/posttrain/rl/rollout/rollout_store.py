"""Stores finished trajectory groups on disk, so that a crash loses none.

A rollout is always split into the same chunks of groups. A finished chunk is one file, written durably. After a crash
existing chunks are replayed and the others are requested again with the same composition, because the engine batches a
request as a whole, so the composition determines the bits.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import xxhash

from posttrain import store
from posttrain.errors import CheckpointError
from posttrain.rl.batching.stored_routes import open_routes
from posttrain.types import Routes, TrajectoryGroup


class RolloutStore:
    """The rollouts of a training run.

    Args:
        folder: `train/rollouts`.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, step: int, chunk: int) -> list[TrajectoryGroup] | None:
        """Return the groups of a finished chunk, None if it does not exist.

        Raises:
            CheckpointError: The file is damaged.
        """
        path = self._path(step, chunk)
        if not path.exists():
            return None
        try:
            groups = [with_routes_in(TrajectoryGroup.from_dict(row), path.parent) for row in store.read_json(path)]
            for group in groups:
                check_routes(group)
            return groups
        except (ValueError, KeyError, TypeError, CheckpointError) as error:
            raise CheckpointError(
                "rollout-invalid", f"{path}: not a rollout ({error}); delete it and run again"
            ) from error

    def read_step(self, step: int, num_groups: int) -> list[TrajectoryGroup]:
        """Return all groups of a step.

        Raises:
            CheckpointError: Some groups are missing or damaged.
        """
        folder = self._path(step, 0).parent
        chunks = [self.read(step, number) or [] for number, _ in enumerate(folder.glob("chunk_*.json"))]
        groups = [group for chunk in chunks for group in chunk]
        if len(groups) != num_groups:
            remedy = "logging.keep_rollouts=true keeps those of steps to come"
            raise CheckpointError(
                "rollout-incomplete", f"{folder}: {len(groups)} of {num_groups} groups are there; {remedy}"
            )
        return groups

    def write(self, step: int, chunk: int, groups: list[TrajectoryGroup]) -> None:
        """Persist a finished chunk durably."""
        rows = [group.as_dict() for group in groups]
        store.write_text(self._path(step, chunk), json.dumps(rows, allow_nan=False) + "\n")

    def write_routes(self, step: int, chunk: int, routes: Sequence[Sequence[np.ndarray]]) -> list[tuple[Routes, ...]]:
        """Persist the expert routes of a chunk's trajectories; call it before writing the chunk, which refers to them.

        Args:
            step: From 0.
            chunk: Its number.
            routes: Of each trajectory, one per segment [tokens, layers, experts per token]; none if not recorded.
        """
        return write_routes(self._path(step, chunk).with_suffix(".routes"), routes)

    def forget_before(self, step: int) -> None:
        """Delete rollouts of steps that a committed checkpoint covers."""
        for folder in self._folder.glob("step_*"):
            if int(folder.name.removeprefix("step_")) < step:
                shutil.rmtree(folder)

    def _path(self, step: int, chunk: int) -> Path:
        return self._folder / f"step_{step:06d}" / f"chunk_{chunk:04d}.json"


def write_routes(path: Path, routes: Sequence[Sequence[np.ndarray]]) -> list[tuple[Routes, ...]]:
    """Write the expert routes of trajectories into one file, durably; none if there are none.

    Args:
        path: The file.
        routes: Of each trajectory, one per segment [tokens, layers, experts per token].
    """
    # Layers first, so that a pipeline stage reads only its own.
    rows = [[np.ascontiguousarray(one.transpose(1, 0, 2)) for one in segments] for segments in routes]
    flat = list(chain.from_iterable(rows))
    if flat:
        store.write_atomic(path, lambda file: file.writelines(row.data for row in flat))
    offsets = iter(accumulate((row.nbytes for row in flat), initial=0))
    return [tuple(_section(path, next(offsets), row) for row in segments) for segments in rows]


def _section(path: Path, offset: int, row: np.ndarray) -> Routes:
    shape = (row.shape[0], row.shape[1], row.shape[2])
    return Routes(str(path), offset, shape, row.dtype.name, xxhash.xxh3_64_hexdigest(row.data))


def with_routes_in(group: TrajectoryGroup, folder: Path) -> TrajectoryGroup:
    """Return a group whose routes are in a folder: a run's folder may have moved, and a group moves in it."""

    def moved(routes: Routes) -> Routes:
        return dataclasses.replace(routes, file=str(folder / Path(routes.file).name))

    trajectories = (dataclasses.replace(one, routes=tuple(map(moved, one.routes))) for one in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(trajectories))


def check_routes(group: TrajectoryGroup) -> None:
    """Check that a group's routes are those that were written.

    Raises:
        ValueError: A file is damaged.
        CheckpointError: A file is missing or truncated.
    """
    for routes in (routes for trajectory in group.trajectories for routes in trajectory.routes):
        if xxhash.xxh3_64_hexdigest(open_routes(routes).data) != routes.digest:
            raise ValueError(f"{routes.file} is damaged")

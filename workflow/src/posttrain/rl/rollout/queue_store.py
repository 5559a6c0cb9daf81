"""Stores the groups of a queue on disk, so that a crash loses no finished one and none is trained on twice.

    queue/group_00000123.json     a finished group, by its position, until a step takes it
    queue/group_00000123.routes   the experts of its tokens, if routing is replayed
    queue/done_000012.json        the positions that the first 12 steps have trained on or dropped
    step_000012/chunk_0000.json   the groups that step 12 (from 0) trains on: `RolloutStore`'s own file

A step takes its groups when its chunk appears, by one rename, before it trains on them. A run that is killed later and
resumes from an older checkpoint takes the same groups in the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from posttrain import store
from posttrain.checkpoint.staging.file_placement import copy_plainly, hard_link
from posttrain.errors import CheckpointError
from posttrain.rl.rollout.rollout_store import RolloutStore, check_routes, with_routes_in, write_routes
from posttrain.types import Routes, TrajectoryGroup

# Ending of a group's file of expert routes.
ROUTES = ".routes"


class QueueStore(RolloutStore):
    """The rollouts of a training run whose groups pass through a queue.

    Args:
        folder: `train/rollouts`.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._queue = folder / "queue"

    def write_group_routes(self, position: int, routes: Sequence[Sequence[np.ndarray]]) -> list[tuple[Routes, ...]]:
        """Persist the expert routes of a group's trajectories (`write_routes`); call it before `write_group`."""
        return write_routes(self._group(position).with_suffix(ROUTES), routes)

    def write_group(self, group: TrajectoryGroup) -> None:
        """Persist a finished group durably."""
        store.write_text(self._group(group.position), json.dumps(group.as_dict(), allow_nan=False) + "\n")

    def read_groups(self) -> Iterator[TrajectoryGroup]:
        """Yield the finished groups that no step has taken, in order of their positions.

        Raises:
            CheckpointError: A file is damaged.
        """
        for path in self._queue.glob(f"group_*{ROUTES}"):
            if not path.with_suffix(".json").exists():  # of a group that was killed while it was stored
                path.unlink()
        for path in sorted(self._queue.glob("group_*.json")):
            try:
                group = with_routes_in(TrajectoryGroup.from_dict(store.read_json(path)), self._queue)
                check_routes(group)
                yield group
            except (ValueError, KeyError, TypeError, CheckpointError) as error:
                words = f"{path}: not a group ({error}); delete it and run again"
                raise CheckpointError("rollout-invalid", words) from error

    def forget_group(self, position: int) -> None:
        """Delete a finished group that no step will take."""
        self._group(position).unlink(missing_ok=True)
        self._group(position).with_suffix(ROUTES).unlink(missing_ok=True)

    def take(
        self, step: int, groups: Sequence[TrajectoryGroup], done: tuple[int, Collection[int]]
    ) -> list[TrajectoryGroup]:
        """Make a step's groups its rollout, durably, and return them with their routes in the step's folder.

        Args:
            step: From 0.
            groups: Its groups, in order.
            done: `TrajectoryQueue.done` after the step has taken them.
        """
        first_open, others = done
        store.write_json(self._done(step + 1), {"first_open": first_open, "others": sorted(others)})
        taken = [self._link_routes(group, self._path(step, 0).parent) for group in groups]
        self.write(step, 0, taken)
        for group in groups:
            self.forget_group(group.position)
        return taken

    def _link_routes(self, group: TrajectoryGroup, folder: Path) -> TrajectoryGroup:
        """Return a group whose routes are also in a folder: linked, because a step's routes take gigabytes."""
        routes = self._group(group.position).with_suffix(ROUTES)
        if not any(trajectory.routes for trajectory in group.trajectories):
            return group
        folder.mkdir(parents=True, exist_ok=True)
        if not hard_link(routes, folder / routes.name):
            copy_plainly(routes, folder / routes.name)
        return with_routes_in(group, folder)

    def read_done(self, finished: int) -> tuple[int, list[int]]:
        """Return `TrajectoryQueue.done` after `finished` steps.

        Raises:
            CheckpointError: The record is missing or damaged.
        """
        if not finished:
            return 0, []
        path = self._done(finished)
        try:
            content = store.read_json(path)
            return content["first_open"], content["others"]
        except (OSError, KeyError, TypeError, CheckpointError) as error:
            words = f"{path}: the positions that {finished} steps have trained on are unknown ({error})"
            raise CheckpointError("rollout-invalid", words) from error

    def taken_from(self, finished: int) -> dict[int, list[int]]:
        """Return the positions of each step that has its groups, from step `finished` on."""
        taken = dict[int, list[int]]()
        for step in range(finished, 1 << 62):
            groups = self.read(step, 0)
            if groups is None:
                return taken
            taken[step] = [group.position for group in groups]
        raise AssertionError("unreachable")

    def forget_before(self, step: int) -> None:
        """Delete what a committed checkpoint of `step` finished steps covers."""
        super().forget_before(step)
        for path in self._queue.glob("done_*.json"):
            if int(path.stem.removeprefix("done_")) < step:
                path.unlink()

    def _group(self, position: int) -> Path:
        return self._queue / f"group_{position:08d}.json"

    def _done(self, finished: int) -> Path:
        return self._queue / f"done_{finished:06d}.json"

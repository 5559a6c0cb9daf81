"""Finished sample groups on disk, so that a crash costs none of them.

A rollout is split into chunks of groups, always the same way. A finished chunk is one file, written durably; after a
crash the chunks that are there are replayed and the others are asked for again, in the same composition: the engine
batches a request as a whole, so the composition decides the bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from posttrain import artifacts
from posttrain.errors import CheckpointError
from posttrain.types import SampleGroup


class RolloutStore:
    """The rollouts of a training run.

    Args:
        folder: `train/rollouts`.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, step: int, chunk: int) -> list[SampleGroup] | None:
        """Return the groups of a finished chunk, None where it is not there.

        Raises:
            CheckpointError: When the file is damaged.
        """
        path = self._path(step, chunk)
        if not path.exists():
            return None
        try:
            rows = artifacts.read_json(path)
            return [SampleGroup.from_dict(row) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not a rollout ({error}); delete it and run again") from error

    def read_step(self, step: int, num_groups: int) -> list[SampleGroup]:
        """Return all groups of a step.

        Raises:
            CheckpointError: Some are not there, or damaged.
        """
        folder = self._path(step, 0).parent
        chunks = [self.read(step, number) or [] for number, _ in enumerate(folder.glob("chunk_*.json"))]
        groups = [group for chunk in chunks for group in chunk]
        if len(groups) != num_groups:
            remedy = "logging.keep_rollouts=true keeps those of steps to come"
            raise CheckpointError(f"{folder}: {len(groups)} of {num_groups} groups are there; {remedy}")
        return groups

    def write(self, step: int, chunk: int, groups: list[SampleGroup]) -> None:
        """Persist a finished chunk durably."""
        rows = [group.as_dict() for group in groups]
        artifacts.write_text(self._path(step, chunk), json.dumps(rows, allow_nan=False) + "\n")

    def forget_before(self, step: int) -> None:
        """Delete rollouts of steps that a committed checkpoint has made superfluous."""
        for folder in self._folder.glob("step_*"):
            if int(folder.name.removeprefix("step_")) < step:
                shutil.rmtree(folder)

    def _path(self, step: int, chunk: int) -> Path:
        return self._folder / f"step_{step:06d}" / f"chunk_{chunk:04d}.json"

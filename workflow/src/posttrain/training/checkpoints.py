"""The checkpoints of a training run on disk: written aside, made visible by one rename, the newest few kept.

A checkpoint exists when its folder `step_000020` does. Until then it is `step_000020.partial`, and while it is deleted
it is `step_000020.expired`: nobody reads either, and what a dead attempt left of them is reported and removed. The
number of finished steps is the state: seeds, prompts and learning rate follow from it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain import artifacts

log = logging.getLogger(__name__)

_COMMITTED = re.compile(r"step_(\d+)")


class CheckpointFolder:
    """All checkpoints of one run.

    Args:
        folder: `train/checkpoints`.
        keep: Newest checkpoints to keep.
        may_commit: Called right before a checkpoint becomes visible; raises when the run has another writer by now.
    """

    def __init__(self, folder: Path, keep: int, may_commit: Callable[[], None] = lambda: None):
        self._folder, self._keep, self._may_commit = folder, keep, may_commit
        folder.mkdir(parents=True, exist_ok=True)

    def newest_step(self) -> int:
        """Return the finished steps of the newest committed checkpoint, 0 where there is none."""
        committed = self._committed()
        return committed[-1][0] if committed else 0

    def path(self, step: int) -> Path:
        """Return the folder of a committed checkpoint."""
        return self._folder / f"step_{step:06d}"

    def remove_leftovers(self) -> None:
        """Report and delete what dead attempts were writing or deleting."""
        for suffix, work in (("partial", "written"), ("expired", "deleted")):
            for leftover in self._folder.glob(f"step_*.{suffix}"):
                log.warning("removing %s: an earlier attempt ended while it was %s", leftover, work)
                shutil.rmtree(leftover)

    def partial(self, step: int) -> Path:
        """Return the folder that the checkpoint after `step` finished steps is written into."""
        return artifacts.partial_of(self.path(step))

    def begin(self, step: int) -> None:
        """Make that folder; it must not exist."""
        self.partial(step).mkdir()

    def commit(self, step: int) -> None:
        """Make the checkpoint visible, and delete the oldest beyond those kept.

        Raises:
            RuntimeError: When another supervisor has taken over the run.
        """
        partial = self.partial(step)
        artifacts.sync_tree(partial)
        self._may_commit()
        partial.rename(self.path(step))
        artifacts.sync_folder(self._folder)
        for _, old in self._committed()[: -self._keep]:
            self._delete(old)

    def _delete(self, checkpoint: Path) -> None:
        """Take the name away first: a folder half deleted must not pass for a checkpoint."""
        expired = checkpoint.with_suffix(".expired")
        checkpoint.rename(expired)
        shutil.rmtree(expired)

    def _committed(self) -> list[tuple[int, Path]]:
        found = ((_COMMITTED.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)

"""Loads and saves weights, optimizer and the number of finished steps."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs
from posttrain.rl.megatron_backend import checkpoint
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.training.checkpoint_writer import CheckpointWriter, in_thread
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.rl.training.phases import PhaseClock

log = logging.getLogger(__name__)
# In `PhaseClock.seconds`: how long the trainer stood still for a checkpoint, its beginning between two steps included.
SAVE_PAUSE = "save_pause"


class CheckpointToLoad:
    """The checkpoint to resume from, while its content is checked; see `CheckpointFolder`.

    Args:
        checkpoints: The run's checkpoints.
        finished: Finished steps of the one to load, 0 for none; by default the newest that this node sees.

    Raises:
        RuntimeError: This node sees a newer one.
    """

    def __init__(self, checkpoints: CheckpointFolder, finished: int | None):
        newest = checkpoints.newest_step()
        if finished is not None and newest > finished:
            raise RuntimeError(
                f"step {newest} is committed, but the head of the job saw only step {finished}: start again"
            )
        self.finished = newest if finished is None else finished
        self.folder = checkpoints.path(self.finished)
        # Reading takes longest at startup, so it begins before the ranks meet and the model is built.
        self._check = in_thread(partial(_check_content, checkpoints, self.finished))

    def wait_checked(self) -> None:
        """Wait until the checkpoint's content has been compared with its manifest.

        Raises:
            CheckpointError: The content differs.
        """
        self._check.result()


class SavedState:
    """The state of a run's policy and its checkpoints.

    Args:
        policy: Model and optimizer.
        torch_dist: Initial weights.
        to_load: The checkpoint to resume from.
        checkpoints: The run's checkpoints.
        writer: Writes checkpoints.
    """

    def __init__(
        self,
        policy: Policy,
        torch_dist: Path,
        to_load: CheckpointToLoad,
        checkpoints: CheckpointFolder,
        writer: CheckpointWriter,
    ):
        self._policy, self._torch_dist, self._to_load = policy, torch_dist, to_load
        self._checkpoints, self._writer = checkpoints, writer
        self._begin_seconds = 0.0

    def restore(self) -> int:
        """Load the checkpoint to resume from, or the initial weights; returns the finished steps."""
        finished = self._to_load.finished
        if finished:
            log.info("resuming after step %d", finished)
            self._to_load.wait_checked()
            checkpoint.load_training_state(self._policy, self._to_load.folder)
        else:
            checkpoint.load_weights(self._policy.chunks, self._torch_dist)
            assert self._policy.optimizer is not None, "a policy that is trained has one"
            self._policy.optimizer.reload_model_params()
        return finished

    def remove_leftovers(self) -> None:
        """Delete leftovers of dead attempts, on rank 0 once it is the run's only writer."""
        self._checkpoints.remove_leftovers()

    def begin_save(self, finished: int, canary: ReferenceLogprobs | None = None) -> None:
        """Start writing the state after `finished` steps; the next rollout does not change it."""
        started = time.perf_counter()
        self._writer.begin(finished, canary)
        self._begin_seconds = time.perf_counter() - started

    def finish_save(self, clock: PhaseClock) -> None:
        """Wait until the checkpoint in progress, if any, is committed; call it before changing the state."""
        if self._writer.is_writing:
            with clock.phase("save"):
                self._writer.finish()
            clock.seconds[SAVE_PAUSE] = self._begin_seconds + clock.seconds["save"]


def _check_content(checkpoints: CheckpointFolder, finished: int) -> None:
    """Check this rank's share of a checkpoint, if any, against its manifest."""
    if finished:
        checkpoints.check_content(finished, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

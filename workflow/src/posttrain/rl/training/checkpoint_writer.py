"""Writes checkpoints in a thread while the main thread does not change the training state.

It needs no copy: from the end of a step to the first pass of the next, while the rollout runs, weights and optimizer
state do not change. With colocation they are then in host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, write_reference_logprobs
from posttrain.rl.megatron_backend import checkpoint
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.plain_data import gather_plain
from posttrain.rl.megatron_backend.sleep import SleepingTrainer
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.store import FileRecord
from posttrain.store.durable import naming

log = logging.getLogger(__name__)

# Ranks wait for the slowest writer. `finish`, where training waits, detects a hang.
WRITE_TIMEOUT = timedelta(days=1)


class CheckpointWriter:
    """Writes and commits one checkpoint at a time; every rank has one and makes the same calls.

    Args:
        policy: Model and optimizer; must not change between `begin` and the end of `finish`.
        folder: The run's checkpoints.
        needed_bytes: Size of a checkpoint, for the message when the disk is full.
        forget_before: Called on rank 0 after a commit, with the checkpoint's finished steps.
        trainer: Offloads the written state to host memory meanwhile; None without colocation.
    """

    def __init__(
        self,
        policy: Policy,
        folder: CheckpointFolder,
        needed_bytes: int,
        forget_before: Callable[[int], None],
        trainer: SleepingTrainer | None = None,
    ):
        self._policy, self._folder, self._forget_before = policy, folder, forget_before
        self._trainer = trainer
        self._needed_bytes = needed_bytes
        self._is_rank0 = dist.get_rank() == 0
        # The main thread uses the default group.
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._written: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._written is not None

    def begin(self, finished: int, canary: ReferenceLogprobs | None = None) -> None:
        """Start writing the state after `finished` steps; their metrics must be on disk already.

        Args:
            finished: Number of finished steps.
            canary: Reference log-probabilities of these weights, stored in the checkpoint.
        """
        assert self._written is None, "one checkpoint at a time"
        started = time.perf_counter()
        partial_folder = self._folder.partial(finished)
        with naming(partial_folder, needed_bytes=self._needed_bytes):
            if self._is_rank0:
                self._folder.begin(finished)
            checkpoint.barrier()
            write = checkpoint.prepare_save(self._policy, finished, partial_folder, self._group, self._trainer)
        self._written = in_thread(partial(self._write_and_commit, finished, write, canary, started))

    def finish(self) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            OSError: It could not be written; names its folder and size.
            LeaseLostError: Another supervisor has taken over the run.
        """
        assert self._written is not None, "no checkpoint was begun"
        self._written.result()
        self._written = None

    def _write_and_commit(
        self, finished: int, write: Callable[[], None], canary: ReferenceLogprobs | None, started: float
    ) -> None:
        with naming(self._folder.partial(finished), needed_bytes=self._needed_bytes):
            write()
            if canary and self._is_rank0:
                write_reference_logprobs(self._folder.partial(finished), canary)
            records = self._gather(self._folder.record_share(finished, dist.get_rank()))
            if self._is_rank0:
                self._folder.write_manifest(finished, records)
        if self._is_rank0:
            self._folder.commit(finished)
            self._forget_before(finished)
            seconds = time.perf_counter() - started
            log.info("checkpoint after step %d committed, written in %.1f s", finished, seconds)
        dist.barrier(self._group)

    def _gather(self, mine: list[FileRecord]) -> list[FileRecord]:
        """Return the records of all ranks."""
        return [FileRecord(**record) for records in gather_plain(mine, self._group) for record in records]


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Run a function in a daemon thread and return its future."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done

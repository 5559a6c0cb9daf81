"""The head of a training job: holds the lease, and starts attempts until the training is done.

When anything ends before that, everything is ended and starts again from the newest checkpoint; finished sample groups
are replayed. A node that is gone is replaced by a spare one; where none is left, the scheduler starts the job again
later. A node that fails its preflight is replaced in the same way; where none is left, training ends and names it,
because the scheduler could give the same one again. A crash that makes no progress is not repeated for ever: after
`launch.max_idle_attempts` attempts without a new checkpoint or rollout the head gives up and says where to look.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain import store
from posttrain.cluster.attempt import Attempt, EndedEarlyError, HangError
from posttrain.cluster.inspection import UnfitNodesError, describe_unfit
from posttrain.cluster.job import TrainingJob
from posttrain.cluster.jobset import NUM_NODES
from posttrain.cluster.node_group import AttemptFailedError
from posttrain.cluster.nodes import Allocation, NodesLostError
from posttrain.config.load import load_resolved
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.plan.preflight.judgement import Unfit
from posttrain.store.lease import (
    HEARTBEAT_DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    Lease,
    LeaseHeldError,
    living_holder,
)

log = logging.getLogger(__name__)

LEASE_WAIT_SECONDS = HEARTBEAT_DEAD_SECONDS + HEARTBEAT_SECONDS


def supervise(job: TrainingJob, config: Config, nodes: Allocation) -> None:
    """Run the job to its end under the lease of its run folder.

    Raises:
        RuntimeError: When somebody else writes to the run, when attempts end without progress, or when too few nodes
            are left and the job cannot be started again.
        CheckpointError: What would be loaded is wrong.
        SystemExit: The job is started again because of this exit code (pods).
    """
    # A pod comes when those before it are gone, which may not have had the time to release the lease.
    wait_seconds = LEASE_WAIT_SECONDS if NUM_NODES in os.environ else 0.0
    folder, scheduler = job.run_folder / "lease", nodes.scheduler
    try:
        with Lease(job.run_folder, folder, scheduler.job, scheduler.job_is_alive, wait_seconds) as lease:
            scheduler.give_back()  # what a head has left that was killed
            try:
                _Supervision(job, config, nodes, lease).run()
            finally:
                scheduler.give_back()
    except LeaseHeldError:
        # Two drivers have submitted before either job ran. What is left to do after the other job, this one does.
        holder = living_holder(folder, scheduler.job_is_alive)
        is_another = holder and holder.job != scheduler.job and scheduler.job_is_alive(holder.job)
        if holder and is_another and config.site.slurm.requeue:
            log.warning("%s is being trained by %s", job.run_folder.parent, holder)
            scheduler.requeue(after=holder.job)
        raise


# In an attempt's folder until its end is recorded: the row of `attempts.jsonl` so far.
BEGUN = "begun.json"


class _Supervision:
    """All attempts of a job.

    Args:
        job: What is trained.
        config: The resolved configuration.
        nodes: Where.
        lease: Held by this process.
    """

    def __init__(self, job: TrainingJob, config: Config, nodes: Allocation, lease: Lease):
        self._job, self._config, self._nodes, self._lease = _with_own_config(job, config), config, nodes, lease
        self._idle = 0
        self._fit: set[str] = set()
        self._unfit: Unfit = {}

    def run(self) -> None:
        """Start attempts until the training is done."""
        self._record_killed()
        while True:
            names = self._choose_nodes()
            before = _progress(self._job.run_folder)
            try:
                self._attempt(names)
                return
            except UnfitNodesError as error:
                log.warning("other nodes take their place: %s", error)
                self._nodes.leave_out(list(error.unfit))
                self._unfit |= error.unfit
            except EndedEarlyError:
                self._nodes.scheduler.requeue()
                raise
            except AttemptFailedError as failure:
                self._count(failure, _progress(self._job.run_folder) != before)
                log.warning("restarting from the newest checkpoint: %s", failure)

    def _choose_nodes(self) -> list[str]:
        try:
            return self._nodes.choose(self._config.nodes)
        except NodesLostError as error:
            if self._unfit:
                found = describe_unfit(self._unfit, self._config)
                raise RuntimeError(f"{error}; {found}, or launch.preflight=false") from None
            log.warning("%s", error)
            self._nodes.scheduler.requeue()
            raise

    def _count(self, failure: AttemptFailedError, has_progress: bool) -> None:
        """Give up after too many failures in a row without progress; look at the nodes again where they may be why."""
        # A lost node is no fault of the run's.
        self._idle = 0 if has_progress or failure.lost_nodes else self._idle + 1
        if self._idle == self._config.launch.max_idle_attempts:
            raise RuntimeError(
                f"training ended {self._idle} times without progress, the last time because {failure}; "
                f"see {self._job.run_folder / 'attempts'}"
            )
        if self._idle > 1 or isinstance(failure, HangError):
            self._fit.clear()

    def _attempt(self, names: Sequence[str]) -> None:
        """Run engines and ranks until all ranks are done; record how it went."""
        folder = store.make_next_folder(self._job.run_folder / "attempts")
        row: dict[str, Any] = {
            "attempt": int(folder.name),
            "epoch": self._lease.epoch,
            "started_unix": time.time(),
            "nodes": list(names),
        }
        row |= {"job": self._nodes.scheduler.job} if self._nodes.scheduler.job else {}
        try:
            store.write_json(folder / BEGUN, row)
        except OSError as error:
            # A full disk ends the attempt where it says so.
            log.warning("attempt %d will not be recorded if it is killed: %s", row["attempt"], error)
        reason = "the supervisor was ended"
        attempt = Attempt(self._job, self._config, self._nodes, names, folder, self._lease, self._fit)
        try:
            with attempt:
                attempt.run()
            reason = "done"
        except AttemptFailedError as failure:
            failure.lost_nodes = self._nodes.check(failure.suspects)
            reason = str(failure)
            raise
        except (EndedEarlyError, CheckpointError, UnfitNodesError) as end:
            reason = str(end)
            raise
        finally:
            row |= {"ended_unix": time.time(), "reason": reason}
            if attempt.first_step_unix:
                row["first_step_seconds"] = round(attempt.first_step_unix - row["started_unix"], 1)
            (folder / BEGUN).unlink(missing_ok=True)
            self._record(row)

    def _record_killed(self) -> None:
        """Record attempts whose supervisor could not; they lasted until something was last written of them."""
        for begun in sorted(self._job.run_folder.glob(f"attempts/*/{BEGUN}")):
            row = store.read_json(begun)
            ended = max(path.stat().st_mtime for path in begun.parent.iterdir())
            begun.unlink()
            self._record({**row, "ended_unix": ended, "reason": "the supervisor was killed"})

    def _record(self, row: dict[str, Any]) -> None:
        try:
            store.append_json_line(self._job.run_folder / "attempts.jsonl", row)
        except OSError as error:
            # Never instead of what has ended the attempt.
            if row["reason"] == "done":
                raise
            log.warning("attempt %d is not recorded: %s", row["attempt"], error)


def _with_own_config(job: TrainingJob, config: Config) -> TrainingJob:
    """Copy the configuration to where no other driver writes: the next driver may replace it, with other nodes.

    Raises:
        RuntimeError: It was replaced since this job has read it.
    """
    own = job.run_folder / "job.config.yaml"
    store.write_text(own, job.config_path.read_text(encoding="utf-8"))
    if load_resolved(own) != config:
        raise RuntimeError(f"{job.config_path} was written anew while the job began; give the same command again")
    return dataclasses.replace(job, config_path=own)


def _progress(run_folder: Path) -> tuple[int, int]:
    """Return (checkpoints ever committed by step, finished rollout chunks): it changes when anything was achieved."""
    steps = [int(path.name.removeprefix("step_")) for path in (run_folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0), len(list((run_folder / "rollouts").glob("step_*/chunk_*.json")))

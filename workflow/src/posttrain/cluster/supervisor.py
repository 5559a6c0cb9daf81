"""The head of a training job: holds the lease, and starts attempts until the training is done.

When a process ends early, the head ends the attempt and starts another from the newest checkpoint; finished sample
groups are replayed. Spare nodes replace lost ones; without a spare node, the scheduler requeues the job. Spare nodes
also replace nodes that fail the preflight; without a spare node, training ends and names the unfit nodes, because the
scheduler could allocate them again. After `launch.max_idle_attempts` attempts without a new checkpoint or rollout, the
head gives up and names the logs.
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
    """Train to the end under the lease of the run folder.

    Raises:
        RuntimeError: Another process holds the run, attempts end without progress, or too few nodes are left and the
            job cannot be restarted.
        CheckpointError: A checkpoint is invalid.
        SystemExit: This exit code makes JobSet restart the pods.
    """
    # A new pod starts when the old ones are gone, which may have been killed before they released the lease.
    wait_seconds = LEASE_WAIT_SECONDS if NUM_NODES in os.environ else 0.0
    folder, scheduler = job.run_folder / "lease", nodes.scheduler
    try:
        with Lease(job.run_folder, folder, scheduler.job, scheduler.job_is_alive, wait_seconds) as lease:
            scheduler.give_back()  # left by a head that was killed
            try:
                _Supervision(job, config, nodes, lease).run()
            finally:
                scheduler.give_back()
    except LeaseHeldError:
        # Two drivers submitted before either job ran. This job waits for the other and trains the remaining steps.
        holder = living_holder(folder, scheduler.job_is_alive)
        is_another = holder and holder.job != scheduler.job and scheduler.job_is_alive(holder.job)
        if holder and is_another and config.site.slurm.requeue:
            log.warning("%s is being trained by %s", job.run_folder.parent, holder)
            scheduler.requeue(after=holder.job)
        raise


# File in an attempt's folder until its end is recorded: the attempt's row of `attempts.jsonl` so far.
BEGUN = "begun.json"


class _Supervision:
    """All attempts of a job.

    Args:
        job: The training job.
        config: The resolved configuration.
        nodes: The allocation of nodes.
        lease: The run's lease, held by this process.
    """

    def __init__(self, job: TrainingJob, config: Config, nodes: Allocation, lease: Lease):
        self._job, self._config, self._nodes, self._lease = _with_own_config(job, config), config, nodes, lease
        self._idle = 0
        self._fit: set[str] = set()
        self._unfit: Unfit = {}

    def run(self) -> None:
        """Start attempts until training is done."""
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
        """Raise after too many failures without progress; repeat the preflight if nodes may be the cause."""
        # A lost node is not the run's fault.
        self._idle = 0 if has_progress or failure.lost_nodes else self._idle + 1
        if self._idle == self._config.launch.max_idle_attempts:
            raise RuntimeError(
                f"training ended {self._idle} times without progress, the last time because {failure}; "
                f"see {self._job.run_folder / 'attempts'}"
            )
        if self._idle > 1 or isinstance(failure, HangError):
            self._fit.clear()

    def _attempt(self, names: Sequence[str]) -> None:
        """Run engines and ranks until all ranks are done; record the attempt."""
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
            # If the disk is full, a later write ends the attempt with that error.
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
        """Record attempts of killed supervisors; the newest file of an attempt dates its end."""
        for begun in sorted(self._job.run_folder.glob(f"attempts/*/{BEGUN}")):
            row = store.read_json(begun)
            ended = max(path.stat().st_mtime for path in begun.parent.iterdir())
            begun.unlink()
            self._record({**row, "ended_unix": ended, "reason": "the supervisor was killed"})

    def _record(self, row: dict[str, Any]) -> None:
        try:
            store.append_json_line(self._job.run_folder / "attempts.jsonl", row)
        except OSError as error:
            # This warning must not replace the error that ended the attempt.
            if row["reason"] == "done":
                raise
            log.warning("attempt %d is not recorded: %s", row["attempt"], error)


def _with_own_config(job: TrainingJob, config: Config) -> TrainingJob:
    """Copy the configuration to a file that only this job writes: the next driver may replace the original.

    Raises:
        RuntimeError: It was replaced after this job read it.
    """
    own = job.run_folder / "job.config.yaml"
    store.write_text(own, job.config_path.read_text(encoding="utf-8"))
    if load_resolved(own) != config:
        raise RuntimeError(f"{job.config_path} was written anew while the job began; give the same command again")
    return dataclasses.replace(job, config_path=own)


def _progress(run_folder: Path) -> tuple[int, int, int]:
    """Return the progress: last committed checkpoint's step, finished chunks of rollouts, groups in the queue."""
    steps = [int(path.name.removeprefix("step_")) for path in (run_folder / "checkpoints").glob("step_??????")]
    rollouts = run_folder / "rollouts"
    chunks, groups = ([*rollouts.glob(files)] for files in ("step_*/chunk_*.json", "queue/group_*.json"))
    return max(steps, default=0), len(chunks), len(groups)

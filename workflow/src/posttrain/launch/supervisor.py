"""The head of a training job: holds the lease, and starts attempts until the training is done.

When anything ends before that, everything is ended and starts again from the newest checkpoint; finished sample groups
are replayed. A node that is gone is replaced by a spare one of the allocation; where none is left, the scheduler starts
the job again later. A node that fails its preflight is replaced in the same way; where none is left, training ends and
names it, because the scheduler could give the same one again. A crash that makes no progress is not repeated for ever:
after `launch.max_idle_attempts` attempts without a new checkpoint or rollout the head gives up and says where to look.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from posttrain import artifacts
from posttrain.artifacts.lease import (
    HEARTBEAT_DEAD_SECONDS,
    HEARTBEAT_SECONDS,
    Lease,
    LeaseHeldError,
    living_holder,
)
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.launch.gang import AttemptFailedError, EndedEarlyError, Gang, HangError
from posttrain.launch.inspection import UnfitNodesError
from posttrain.launch.job import TrainingJob
from posttrain.launch.jobset import NUM_NODES
from posttrain.launch.nodes import Nodes, NodesLostError

log = logging.getLogger(__name__)

LEASE_WAIT_SECONDS = HEARTBEAT_DEAD_SECONDS + HEARTBEAT_SECONDS


def supervise(job: TrainingJob, config: Config, nodes: Nodes) -> None:
    """Run the job to its end under the lease of its run folder.

    Raises:
        RuntimeError: When somebody else writes to the run, when attempts end without progress, or when too few nodes
            are left and the job cannot be started again.
        CheckpointError: What would be loaded is wrong.
        SystemExit: The job is started again because of this exit code (pods).
    """
    # A pod comes when those before it are gone, which may not have had the time to release the lease.
    wait_seconds = LEASE_WAIT_SECONDS if NUM_NODES in os.environ else 0.0
    folder = job.run_folder / "lease"
    try:
        with Lease(job.run_folder, folder, nodes.job, nodes.job_is_alive, wait_seconds) as lease:
            _Supervision(job, config, nodes, lease).run()
    except LeaseHeldError:
        # Two drivers have submitted before either job ran. What is left to do after the other job, this one does.
        holder = living_holder(folder, nodes.job_is_alive)
        if config.site.slurm.requeue and holder and holder.job != nodes.job and nodes.job_is_alive(holder.job):
            log.warning("%s is being trained by %s", job.run_folder.parent, holder)
            nodes.requeue(after=holder.job)
        raise


class _Supervision:
    """All attempts of a job.

    Args:
        job: What is trained.
        config: The resolved configuration.
        nodes: Where.
        lease: Held by this process.
    """

    def __init__(self, job: TrainingJob, config: Config, nodes: Nodes, lease: Lease):
        self._job, self._config, self._nodes, self._lease = job, config, nodes, lease
        self._idle = 0
        self._fit: set[str] = set()
        self._unfit: dict[str, str] = {}

    def run(self) -> None:
        """Start attempts until the training is done."""
        while True:
            names = self._choose_nodes()
            before = _progress(self._job.run_folder)
            try:
                self._attempt(names)
                return
            except UnfitNodesError as error:
                log.warning("other nodes take their place: %s", error)
                self._nodes.leave_out(list(error.unfit))
                self._unfit |= {name: ", ".join(reasons) for name, reasons in error.unfit.items()}
            except EndedEarlyError:
                self._nodes.requeue()
                raise
            except AttemptFailedError as failure:
                self._count(failure, _progress(self._job.run_folder) != before)
                log.warning("restarting from the newest checkpoint: %s", failure)

    def _choose_nodes(self) -> list[str]:
        try:
            return self._nodes.choose(self._config.nodes)
        except NodesLostError as error:
            if self._unfit:
                found = "".join(f"\n  {name}: {why}" for name, why in self._unfit.items())
                remedy = f"mend them, or {self._exclusion()}, or launch.preflight=false"
                raise RuntimeError(f"{error}; unfit to train:{found}\n  remedy: {remedy}") from None
            log.warning("%s", error)
            self._nodes.requeue()
            raise

    def _exclusion(self) -> str:
        """Return what keeps the next job off the unfit nodes."""
        if self._config.site.launcher == "kubernetes":
            return f"kubectl cordon {' '.join(self._unfit)}"
        return f"site.slurm.extra_options: ['--exclude={','.join(self._unfit)}']"

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
        number = _next_attempt(self._job.run_folder)
        folder = self._job.run_folder / "attempts" / f"{number:03d}"
        folder.mkdir(parents=True)
        row = {"attempt": number, "epoch": self._lease.epoch, "started_unix": time.time(), "nodes": list(names)}
        row |= {"job": self._nodes.job} if self._nodes.job else {}
        reason = "the supervisor was ended"
        gang = Gang(self._job, self._config, self._nodes, names, folder, self._lease, self._fit)
        try:
            with gang:
                gang.run()
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
            if gang.first_step_unix:
                row["first_step_seconds"] = round(gang.first_step_unix - row["started_unix"], 1)
            artifacts.append_json_line(self._job.run_folder / "attempts.jsonl", row)


def _progress(run_folder: Path) -> tuple[int, int]:
    """Return (checkpoints ever committed by step, finished rollout chunks): it changes when anything was achieved."""
    steps = [int(path.name.removeprefix("step_")) for path in (run_folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0), len(list((run_folder / "rollouts").glob("step_*/chunk_*.json")))


def _next_attempt(run_folder: Path) -> int:
    numbers = [int(path.name) for path in (run_folder / "attempts").glob("[0-9]*")]
    return max(numbers, default=0) + 1

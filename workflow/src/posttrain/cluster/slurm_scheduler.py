"""The scheduler of a SLURM job: its time limit, its requeueing and its spare jobs."""

from __future__ import annotations

import logging
import signal
import sys
import time
from datetime import datetime

from posttrain.cluster.slurm_query import JOB_PREFIX, QUERY_SECONDS, ask, job_is_alive, job_number
from posttrain.cluster.spare_jobs import SpareJobs

log = logging.getLogger(__name__)

# Each running job polls the controller this often; saves are requested this much earlier.
END_QUERY_SECONDS = 20.0


class SlurmScheduler:
    """SLURM as the scheduler of this process's job.

    Args:
        job_id: SLURM's number of the job.
        may_requeue: Whether the site lets jobs requeue (`site.slurm.requeue`).
        spare_jobs: Jobs that hold the job's spare nodes.
    """

    def __init__(self, job_id: str, may_requeue: bool, spare_jobs: SpareJobs):
        self._job_id, self._may_requeue, self._spare_jobs = job_id, may_requeue, spare_jobs
        self._next_query = 0.0
        self.job = f"{JOB_PREFIX}{job_id}"

    def job_is_alive(self, job: str) -> bool | None:
        """Return whether SLURM runs or queues a job; None if unknown."""
        return job_is_alive(job)

    def end_is_near(self, seconds: float) -> bool:
        """Return whether the job ends within a number of seconds.

        It polls SLURM, because an administrator may move the time limit.
        """
        if time.monotonic() < self._next_query:
            return False
        self._next_query = time.monotonic() + END_QUERY_SECONDS
        try:
            end = ask("squeue", "--noheader", "--jobs", self._job_id, "--format", "%e")
        except RuntimeError as error:
            log.warning("SLURM does not say when the job ends: %s", error)
            return False
        if end in ("", "N/A", "NONE", "Unknown"):
            return False
        return datetime.fromisoformat(end).timestamp() - time.time() < seconds + END_QUERY_SECONDS

    def requeue(self, after: str = "") -> None:
        """Requeue the job under the same id.

        Args:
            after: Another of our jobs, which has to end first.

        Raises:
            RuntimeError: The site does not allow it.
        """
        if not self._may_requeue:
            raise RuntimeError("site.slurm.requeue is false: give the same command again, it goes on where this ended")
        log.warning("job %s goes back into the queue%s", self._job_id, f", behind {after}" if after else "")
        if after:  # SLURM sets a dependency only on a queued job, and requeueing sends this process SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:  # with `after`, the other job owns the run's spare jobs
            self.give_back()
        ask("scontrol", "requeue", self._job_id)
        if after:
            ask("scontrol", "update", f"JobId={self._job_id}", f"Dependency=afterany:{job_number(after)}")
            sys.exit(1)
        while True:  # SLURM ends this process with the job
            time.sleep(QUERY_SECONDS)

    def give_back(self) -> None:
        """Cancel the run's spare jobs, also those of its earlier jobs."""
        self._spare_jobs.cancel_all()

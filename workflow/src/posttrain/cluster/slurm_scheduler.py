"""The scheduler of a SLURM job: when it ends, and how it is started again."""

from __future__ import annotations

import logging
import signal
import sys
import time
from datetime import datetime

from posttrain.cluster.slurm_query import JOB_PREFIX, QUERY_SECONDS, ask, job_is_alive, job_number
from posttrain.cluster.spare_jobs import SpareJobs

log = logging.getLogger(__name__)

# Each running job asks the controller this often; who is asked to save is asked so much sooner.
END_QUERY_SECONDS = 20.0


class SlurmScheduler:
    """SLURM, as the job that this process runs in asks it.

    Args:
        job_id: SLURM's number of the job.
        may_requeue: The site lets jobs go back into the queue (`site.slurm.requeue`).
        spare_jobs: Jobs that hold nodes beside it.
    """

    def __init__(self, job_id: str, may_requeue: bool, spare_jobs: SpareJobs):
        self._job_id, self._may_requeue, self._spare_jobs = job_id, may_requeue, spare_jobs
        self._next_query = 0.0
        self.job = f"{JOB_PREFIX}{job_id}"

    def job_is_alive(self, job: str) -> bool | None:
        """Return whether SLURM runs a job or will; None where it cannot be told."""
        return job_is_alive(job)

    def end_is_near(self, seconds: float) -> bool:
        """Return whether the job ends within so many seconds.

        SLURM is asked now and then, because an administrator may move the end.
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
        """Have the job started again later, under the same id.

        Args:
            after: Another job of ours that has to end first.

        Raises:
            RuntimeError: The site does not allow it.
        """
        if not self._may_requeue:
            raise RuntimeError("site.slurm.requeue is false: give the same command again, it goes on where this ended")
        log.warning("job %s goes back into the queue%s", self._job_id, f", behind {after}" if after else "")
        if after:  # which SLURM takes only of a job in the queue, where it also ends this process
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:  # the other job has taken the run, and has spare nodes of its own
            self.give_back()
        ask("scontrol", "requeue", self._job_id)
        if after:
            ask("scontrol", "update", f"JobId={self._job_id}", f"Dependency=afterany:{job_number(after)}")
            sys.exit(1)
        while True:  # SLURM ends this process with the job
            time.sleep(QUERY_SECONDS)

    def give_back(self) -> None:
        """Cancel the jobs of nodes that came later, those of the run's earlier jobs too."""
        self._spare_jobs.cancel_all()

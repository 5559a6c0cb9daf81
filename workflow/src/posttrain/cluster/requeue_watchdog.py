"""Requeues a job that lost its first node: `python -m posttrain.cluster.requeue_watchdog`, on other nodes.

A job with spare nodes survives the loss of any node: SLURM only removes the node from the job, even if the job's
command ran there. The other nodes would then idle until the time limit. So the watchdog polls SLURM, and requeues the
job when the command's node is no longer in it.
"""

from __future__ import annotations

import logging
import time

from posttrain import cli
from posttrain.cluster.slurm_query import ask
from posttrain.cluster.slurm_scheduler import END_QUERY_SECONDS

log = logging.getLogger(__name__)


def main() -> None:
    """Wait until the job loses its command's node, then requeue it; the job's end normally ends this process."""
    job = cli.command_line(__doc__, job=(str, "SLURM's number of the job")).job
    while not has_lost_its_command(job):
        time.sleep(END_QUERY_SECONDS)
    try:
        ask("scontrol", "requeue", job)
    except RuntimeError as error:
        # The site forbids requeueing. Cancelling frees the nodes, and the driver sees that the job ended.
        log.error("%s", error)
        ask("scancel", job)


def has_lost_its_command(job: str) -> bool:
    """Return whether a running job has lost the node on which its command ran.

    Args:
        job: SLURM's number of the job.
    """
    try:
        state, first, nodes = ask("squeue", "--noheader", "--jobs", job, "--format", "%T|%B|%N").split("|")
        return state == "RUNNING" and first not in ask("scontrol", "show", "hostnames", nodes).split()
    except (RuntimeError, ValueError) as error:
        log.warning("SLURM does not tell about job %s: %s", job, error)
        return False


if __name__ == "__main__":
    cli.run(main, role="requeue watchdog")

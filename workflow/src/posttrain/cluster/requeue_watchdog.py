"""What goes on when the first node of a job is lost: `python -m posttrain.cluster.requeue_watchdog`, on other nodes.

A job with spare nodes outlives any of its nodes. SLURM takes a lost one away from it and does no more, also where it
was the one on which the job's command ran: the others would idle until the time limit. So a watchdog asks SLURM now and
then, and has the job started again when the node of its command is no longer among its nodes.
"""

from __future__ import annotations

import logging
import time

from posttrain import cli
from posttrain.cluster.slurm_query import ask
from posttrain.cluster.slurm_scheduler import END_QUERY_SECONDS

log = logging.getLogger(__name__)


def main() -> None:
    """Wait until the job ends, as a rule with this process; else put it back into the queue."""
    job = cli.command_line(__doc__, job=(str, "SLURM's number of the job")).job
    while not has_lost_its_command(job):
        time.sleep(END_QUERY_SECONDS)
    try:
        ask("scontrol", "requeue", job)
    except RuntimeError as error:
        # The site forbids it. The nodes are given back, and the driver says that the job has ended.
        log.error("%s", error)
        ask("scancel", job)


def has_lost_its_command(job: str) -> bool:
    """Return whether a running job has lost the node on which its command ran.

    Args:
        job: SLURM's number of it.
    """
    try:
        state, first, nodes = ask("squeue", "--noheader", "--jobs", job, "--format", "%T|%B|%N").split("|")
        return state == "RUNNING" and first not in ask("scontrol", "show", "hostnames", nodes).split()
    except (RuntimeError, ValueError) as error:
        log.warning("SLURM does not tell about job %s: %s", job, error)
        return False


if __name__ == "__main__":
    cli.run(main, role="requeue watchdog")

"""The command of a job that holds a spare node: `python -m posttrain.cluster.spare_node`.

It only waits for the training job to end. The training job's head starts processes on this node, and normally cancels
this job when it ends; this process ends the job if the head was killed.
"""

from __future__ import annotations

import time

from posttrain import cli
from posttrain.cluster.slurm_query import job_state
from posttrain.cluster.slurm_scheduler import END_QUERY_SECONDS

# States in which a job has its nodes; a requeued job has none.
STATES_WITH_NODES = ("RUNNING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")


def main() -> None:
    """Wait until the training job ends; retry if SLURM does not answer."""
    job = cli.command_line(__doc__, job=(str, "SLURM's number of the job that trains")).job
    while job_state(job) in (None, *STATES_WITH_NODES):
        time.sleep(END_QUERY_SECONDS)


if __name__ == "__main__":
    cli.run(main, role="spare node")

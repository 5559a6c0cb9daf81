"""What runs in a job that holds a spare node: `python -m posttrain.cluster.spare_node`.

It does nothing but end with the job that trains: the head of that one starts on the node what it needs, and cancels
this job at its own end. This process is for a head that was killed and could not cancel it.
"""

from __future__ import annotations

import time

from posttrain import cli
from posttrain.cluster.slurm_query import job_state
from posttrain.cluster.slurm_scheduler import END_QUERY_SECONDS

# In which a job has its nodes; one that was put back into the queue has none.
STATES_WITH_NODES = ("RUNNING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")


def main() -> None:
    """Wait for the end of the job that trains; a SLURM that does not answer is asked again."""
    job = cli.command_line(__doc__, job=(str, "SLURM's number of the job that trains")).job
    while job_state(job) in (None, *STATES_WITH_NODES):
        time.sleep(END_QUERY_SECONDS)


if __name__ == "__main__":
    cli.run(main, role="spare node")

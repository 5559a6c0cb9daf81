"""What a site's scheduler says about jobs that were submitted from a folder."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SQUEUE_FIELDS = ("%i", "%T", "%M", "%D", "%r", "%k", "%Z")
# A controller that starts thousands of jobs keeps squeue waiting; somebody watches, and nothing depends on the answer.
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue or on its nodes.

    Args:
        job: Its id.
        state: The scheduler's word: PENDING, RUNNING, ...
        time: How long it has run.
        num_nodes: On how many nodes.
        reason: Why it waits; "None" where it does not.
        comment: What Snakemake says of it: the rule.
    """

    job: str
    state: str
    time: str
    num_nodes: str
    reason: str
    comment: str


def queued_jobs(launcher: str, folder: Path) -> list[QueuedJob]:
    """Return the user's jobs that were submitted from a folder; none where the launcher has no queue.

    Args:
        launcher: `site.launcher`.
        folder: Where Snakemake was started.

    Raises:
        RuntimeError: When the scheduler does not answer.
    """
    if launcher != "slurm":
        return []
    command = ["squeue", "--me", "--noheader", f"--format={'|'.join(SQUEUE_FIELDS)}"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the queue is not known: {' '.join(command)} failed") from error
    return parse_squeue(listed, folder)


def parse_squeue(listed: str, folder: Path) -> list[QueuedJob]:
    """Return the jobs of a folder from what `squeue` printed.

    Args:
        listed: A line per job, `SQUEUE_FIELDS` joined by "|".
        folder: Where Snakemake was started.
    """
    rows = (line.split("|") for line in listed.splitlines())
    return [QueuedJob(*row[:-1]) for row in rows if os.path.realpath(row[-1]) == os.path.realpath(folder)]

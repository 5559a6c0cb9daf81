"""Jobs in a site's queue that were submitted from one folder."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SQUEUE_FIELDS = ("%i", "%T", "%M", "%D", "%r", "%k", "%Z")
# squeue is slow on a busy controller, and only interactive commands wait for it.
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue or on its nodes.

    Args:
        job: The job's id.
        state: The scheduler's state: PENDING, RUNNING, ...
        time: Its run time.
        num_nodes: Its number of nodes.
        reason: Why it waits; "None" if it does not.
        comment: Snakemake's comment: the rule.
    """

    job: str
    state: str
    time: str
    num_nodes: str
    reason: str
    comment: str


def queued_jobs(launcher: str, folder: Path) -> list[QueuedJob]:
    """Return the user's jobs that were submitted from a folder; empty if the launcher has no queue.

    Args:
        launcher: `site.launcher`.
        folder: Folder in which Snakemake was started.

    Raises:
        RuntimeError: The scheduler does not answer.
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
    """Parse the output of `squeue` and return the jobs of a folder.

    Args:
        listed: A line per job, `SQUEUE_FIELDS` joined by "|".
        folder: Folder in which Snakemake was started.
    """
    rows = (line.split("|") for line in listed.splitlines())
    return [QueuedJob(*row[:-1]) for row in rows if os.path.realpath(row[-1]) == os.path.realpath(folder)]

"""Queries of SLURM's state."""

from __future__ import annotations

import shutil
import subprocess

JOB_PREFIX = "slurm:"
# squeue's states of jobs that will not run again.
ENDED_STATES = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
# A busy controller answers late (its own `MessageTimeout` is 10 s, and commands retry).
QUERY_SECONDS = 60.0


def ask(*command: str) -> str:
    """Return the output of a SLURM command.

    Raises:
        RuntimeError: The command fails or times out.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def job_number(job: str) -> str:
    """Return SLURM's number of one of our jobs."""
    return job.removeprefix(JOB_PREFIX)


def job_state(number: str) -> str | None:
    """Return SLURM's state of a job; "" if SLURM no longer knows it, None if SLURM does not answer.

    Args:
        number: SLURM's number of the job.
    """
    try:
        return ask("squeue", "--noheader", "--states", "all", "--jobs", number, "--format", "%T")
    except RuntimeError as error:
        return "" if "Invalid job id" in str(error) else None


def job_is_alive(job: str) -> bool | None:
    """Return whether SLURM runs or queues a job; None if unknown here.

    Args:
        job: As in `SlurmScheduler.job`.
    """
    if not job.startswith(JOB_PREFIX) or shutil.which("squeue") is None:
        return None
    state = job_state(job_number(job))
    return None if state is None else bool(state) and state not in ENDED_STATES

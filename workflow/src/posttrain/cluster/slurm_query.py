"""What SLURM says when it is asked."""

from __future__ import annotations

import shutil
import subprocess

JOB_PREFIX = "slurm:"
# What squeue shows of jobs that will not run again.
ENDED_STATES = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
# A controller that is busy answers late (its own `MessageTimeout` is 10 s, and commands try again).
QUERY_SECONDS = 60.0


def ask(*command: str) -> str:
    """Return what a command of SLURM prints.

    Raises:
        RuntimeError: It fails, or does not end.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def job_number(job: str) -> str:
    """Return SLURM's number of a job of ours."""
    return job.removeprefix(JOB_PREFIX)


def job_state(number: str) -> str | None:
    """Return SLURM's word for where a job is; "" of a job that it has forgotten, None where it does not tell.

    Args:
        number: SLURM's of the job.
    """
    try:
        return ask("squeue", "--noheader", "--states", "all", "--jobs", number, "--format", "%T")
    except RuntimeError as error:
        return "" if "Invalid job id" in str(error) else None


def job_is_alive(job: str) -> bool | None:
    """Return whether SLURM still runs a job, or will; None where it cannot be told from here.

    Args:
        job: As `SlurmAllocation.job` calls it.
    """
    if not job.startswith(JOB_PREFIX) or shutil.which("squeue") is None:
        return None
    state = job_state(job_number(job))
    return None if state is None else bool(state) and state not in ENDED_STATES

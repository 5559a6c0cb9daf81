"""Wait for a training job that outlived the driver that submitted it.

On one machine training ends with its driver, but a scheduler's job keeps running. `attach` waits for that job, after
which Snakemake runs the later steps. The run's lease shows that training is alive, wherever the job runs; while the job
waits in the queue to restart, the scheduler's queue shows it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from posttrain.cluster.queue import queued_jobs
from posttrain.cluster.slurm_query import job_is_alive
from posttrain.cluster.status import RunStatus, read_status
from posttrain.report.progress import ProgressBar
from posttrain.store import Paths
from posttrain.store.lease import living_holder

log = logging.getLogger(__name__)

# A step takes at least seconds, and every poll reads the run's metrics from shared storage.
POLL_SECONDS = 2.0
# Snakemake's name of the job in SLURM. It is a prefix of `rule_train_grpo`, the name in version 0.2.
TRAINING_RULE = "rule_train"
REMEDY = "the same snakemake command without attach"


def attach(paths: Paths) -> str:
    """Wait until no process trains the run, and show progress.

    Args:
        paths: The run's.

    Returns:
        The run's state, and the command to run next.

    Raises:
        RuntimeError: Training was alive and ended before its last step.
    """
    if not paths.experiment.exists():
        return f"{paths.run.name} has not begun; nothing to attach to"
    was_alive = wait_while_alive(paths)
    status = read_status(paths)
    if status.state in ("finished", "trained"):
        return f"{status.run} is trained; {REMEDY} goes on"
    if status.checkpoint == status.num_steps:
        return f"{status.run} has done all {status.num_steps} steps; {REMEDY} goes on"
    if was_alive:
        reason = status.last_end or "it was killed"
        raise RuntimeError(f"training of {_where(status)}, has ended: {reason}\n  {REMEDY} goes on")
    return f"nothing trains {_where(status)}; {REMEDY} does"


def wait_while_alive(paths: Paths) -> bool:
    """Wait until no process trains the run; return whether one did."""
    who = _who_trains(paths)
    if not who:
        return False
    log.info("attached to %s", who)
    status = read_status(paths)
    with ProgressBar("train", status.num_steps, unit="steps") as bar:
        shown = 0
        while _who_trains(paths):
            status = read_status(paths)
            bar.advance(status.step - shown, note="" if status.reward is None else f"reward {status.reward:.3f}")
            shown = status.step
            time.sleep(POLL_SECONDS)
    return True


def _who_trains(paths: Paths) -> str:
    """Return the holder of the run's lease, or the queued job that will take it; "" if there is neither."""
    holder = living_holder(paths.lease, job_is_alive=job_is_alive)
    if holder is not None:
        return str(holder)
    jobs = queued_jobs(paths.resolved.config.site.launcher, Path.cwd())
    return ", ".join(f"job {job.job} ({job.state})" for job in jobs if job.comment.startswith(TRAINING_RULE))


def _where(status: RunStatus) -> str:
    return f"{status.run}, at step {status.step} of {status.num_steps}, its newest checkpoint at {status.checkpoint}"

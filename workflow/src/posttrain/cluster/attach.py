"""Waits for training that continues without the driver that started it.

On one machine training ends with its driver. A scheduler's job lives on: whoever wants the run's next steps waits for
it here, and then lets Snakemake go on. Who trains is told by the run's lease, so this works wherever the job runs;
while it waits in a queue to be started again, the queue tells.
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

# A step takes seconds at least, and each look reads the run's metrics from shared storage.
POLL_SECONDS = 2.0
# How Snakemake names the job to SLURM; `rule_train_grpo` is one that version 0.2 started.
TRAINING_RULE = "rule_train"
REMEDY = "the same snakemake command without attach"


def attach(paths: Paths) -> str:
    """Wait until nothing trains the run any more, with its progress shown.

    Args:
        paths: Of the run.

    Returns:
        How it stands then, and what to do next.

    Raises:
        RuntimeError: When training was alive and ended before its last step.
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
    """Wait until nothing trains the run; returns whether anything did."""
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

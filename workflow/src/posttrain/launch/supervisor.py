"""The head of a training job: holds the lease, and starts attempts until the training is done.

When anything ends before that, everything is ended and starts again from the newest checkpoint; finished sample groups
are replayed. A node that is gone is replaced by a spare one of the allocation; where none is left, the scheduler starts
the job again later. A crash that makes no progress is not repeated for ever: after `launch.max_idle_attempts` attempts
without a new checkpoint or rollout the head gives up and says where to look.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from posttrain import artifacts
from posttrain.artifacts.lease import HEARTBEAT_DEAD_SECONDS, HEARTBEAT_SECONDS, Lease
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.launch.gang import AttemptFailedError, EndedEarlyError, Gang
from posttrain.launch.job import TrainingJob
from posttrain.launch.jobset import NUM_NODES
from posttrain.launch.nodes import Nodes, NodesLostError

log = logging.getLogger(__name__)

LEASE_WAIT_SECONDS = HEARTBEAT_DEAD_SECONDS + HEARTBEAT_SECONDS


def supervise(job: TrainingJob, config: Config, nodes: Nodes) -> None:
    """Run the job to its end under the lease of its run folder.

    Raises:
        RuntimeError: When somebody else writes to the run, when attempts end without progress, or when too few nodes
            are left and the job cannot be started again.
        CheckpointError: What would be loaded is wrong.
    """
    # A pod comes when those before it are gone, which may not have had the time to release the lease.
    wait_seconds = LEASE_WAIT_SECONDS if NUM_NODES in os.environ else 0.0
    with Lease(job.run_folder, job.run_folder / "lease", nodes.job, nodes.job_is_alive, wait_seconds) as lease:
        idle = 0
        while True:
            names = _choose_nodes(config, nodes)
            before = _progress(job.run_folder)
            try:
                _attempt(job, config, nodes, names, lease)
                return
            except EndedEarlyError:
                nodes.requeue()
                raise
            except AttemptFailedError as failure:
                # A lost node is no fault of the run's.
                is_idle = _progress(job.run_folder) == before and not failure.lost_nodes
                idle = idle + 1 if is_idle else 0
                if idle == config.launch.max_idle_attempts:
                    raise RuntimeError(
                        f"training ended {idle} times without progress, the last time because {failure}; "
                        f"see {job.run_folder / 'attempts'}"
                    ) from None
                log.warning("restarting from the newest checkpoint: %s", failure)


def _choose_nodes(config: Config, nodes: Nodes) -> list[str]:
    try:
        return nodes.choose(config.nodes)
    except NodesLostError as error:
        log.warning("%s", error)
        nodes.requeue()
        raise


def _attempt(job: TrainingJob, config: Config, nodes: Nodes, names: Sequence[str], lease: Lease) -> None:
    """Run engines and ranks until all ranks are done; record how it went."""
    number = _next_attempt(job.run_folder)
    folder = job.run_folder / "attempts" / f"{number:03d}"
    folder.mkdir(parents=True)
    row = {"attempt": number, "epoch": lease.epoch, "started_unix": time.time(), "nodes": list(names)}
    row |= {"job": nodes.job} if nodes.job else {}
    reason = "the supervisor was ended"
    try:
        with Gang(job, config, nodes, names, folder, lease) as gang:
            gang.run()
        reason = "done"
    except AttemptFailedError as failure:
        failure.lost_nodes = nodes.check(failure.suspects)
        reason = str(failure)
        raise
    except (EndedEarlyError, CheckpointError) as end:
        reason = str(end)
        raise
    finally:
        row |= {"ended_unix": time.time(), "reason": reason}
        artifacts.append_json_line(job.run_folder / "attempts.jsonl", row)


def _progress(run_folder: Path) -> tuple[int, int]:
    """Return (checkpoints ever committed by step, finished rollout chunks): it changes when anything was achieved."""
    steps = [int(path.name.removeprefix("step_")) for path in (run_folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0), len(list((run_folder / "rollouts").glob("step_*/chunk_*.json")))


def _next_attempt(run_folder: Path) -> int:
    numbers = [int(path.name) for path in (run_folder / "attempts").glob("[0-9]*")]
    return max(numbers, default=0) + 1

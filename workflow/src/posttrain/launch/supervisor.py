"""One supervisor per node: starts engines and trainer ranks, watches them, restarts them, and alone ends them.

When any process ends before the training is done, the others are ended and all start again from the newest checkpoint;
finished sample groups are replayed. A crash that makes no progress is not repeated for ever: after `MAX_IDLE_ATTEMPTS`
attempts without a new checkpoint or rollout the supervisor gives up and says where to look.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain import artifacts
from posttrain.artifacts.lease import HEARTBEAT_DEAD_SECONDS, HEARTBEAT_SECONDS, Lease
from posttrain.config.schema import Config
from posttrain.engines.process import EngineProcess, check_all_alive, choose_free_ports, running_engines
from posttrain.launch.child import die_with_parent
from posttrain.launch.jobset import NUM_NODES
from posttrain.observability.logging import LOG_VARIABLE
from posttrain.planner.flag import as_environment
from posttrain.planner.megatron_flags import trainer_environment

log = logging.getLogger(__name__)

MAX_IDLE_ATTEMPTS = 3
POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
LOG_TAIL_LINES = 15
LEASE_WAIT_SECONDS = HEARTBEAT_DEAD_SECONDS + HEARTBEAT_SECONDS


@dataclass(frozen=True)
class TrainingJob:
    """What the trainer ranks are given.

    Args:
        config: The resolved configuration.
        run_folder: `train/`: checkpoints, rollouts, metrics, attempts.
        arguments: Command line of a trainer rank without engine addresses and lease.
        rollout_weights: What the engines load first.
        prepare: Called before each start, while nothing runs: makes sure that what is loaded is right.
    """

    config: Config
    run_folder: Path
    arguments: tuple[str, ...]
    rollout_weights: Path
    prepare: Callable[[], None]


def supervise(job: TrainingJob) -> None:
    """Run the job to its end under the lease of its run folder.

    Raises:
        RuntimeError: When somebody else writes to the run, or when attempts end without progress.
    """
    # A pod comes when those before it are gone, which may not have had the time to release the lease.
    wait_seconds = LEASE_WAIT_SECONDS if NUM_NODES in os.environ else 0.0
    with Lease(job.run_folder, job.run_folder / "lease", wait_seconds) as lease:
        idle = 0
        while True:
            before = _progress(job.run_folder)
            reason = _attempt(job, lease)
            if reason is None:
                return
            idle = idle + 1 if _progress(job.run_folder) == before else 0
            if idle == MAX_IDLE_ATTEMPTS:
                raise RuntimeError(
                    f"training ended {idle} times without progress, the last time because {reason}; "
                    f"see {job.run_folder / 'attempts'}"
                )
            log.warning("restarting from the newest checkpoint: %s", reason)


def _attempt(job: TrainingJob, lease: Lease) -> str | None:
    """Run engines and ranks until all ranks are done (None) or anything ends early (the reason)."""
    job.prepare()
    number = _next_attempt(job.run_folder)
    folder = job.run_folder / "attempts" / f"{number:03d}"
    folder.mkdir(parents=True)
    started = time.time()
    reason: str | None = "the supervisor was ended"
    try:
        with (
            running_engines(job.config, job.rollout_weights, folder) as engines,
            _ranks(job, lease, engines, folder) as ranks,
        ):
            reason = _watch(engines, ranks, folder)
    finally:
        _record_attempt(job.run_folder, number, lease.epoch, started, reason)
    return reason


def _watch(engines: list[EngineProcess], ranks: list[subprocess.Popen], folder: Path) -> str | None:
    while True:
        if all(rank.poll() == 0 for rank in ranks):
            return None
        # First the engines: where both have ended, the trainer did because its engine had.
        try:
            check_all_alive(engines)
        except RuntimeError as error:
            return str(error)
        for number, rank in enumerate(ranks):
            if rank.poll() not in (None, 0):
                tail = _tail(folder / f"trainer{number}.log")
                return f"trainer rank {number} {_describe_exit(rank.returncode)}; its log ends with:\n{tail}"
        time.sleep(POLL_SECONDS)


@contextmanager
def _ranks(
    job: TrainingJob, lease: Lease, engines: list[EngineProcess], folder: Path
) -> Iterator[list[subprocess.Popen]]:
    """Start one trainer process per rank of this node and end them with the block."""
    config = job.config
    count = config.hardware.gpus_per_node
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(choose_free_ports(1)[0]),
        **as_environment(trainer_environment(config)),
    }
    environment.pop(LOG_VARIABLE, None)
    addresses = [argument for engine in engines for argument in ("--engine", engine.url)]
    command = [
        *(sys.executable, "-m", "posttrain.launch.trainer_rank", *job.arguments, *addresses),
        *("--lease-folder", str(lease.folder), "--epoch", str(lease.epoch)),
    ]
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(count):
            ranks.append(_start_rank(command, environment, rank, folder))
        yield ranks
    finally:
        for process in ranks:
            _end(process)


def _start_rank(command: list[str], environment: dict[str, str], rank: int, folder: Path) -> subprocess.Popen:
    """Start one rank; rank 0 also writes to our stderr, where its progress bar is seen."""
    log_path = folder / f"trainer{rank}.log"
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LOG_VARIABLE: str(log_path)}
    with open(log_path, "ab") as sink:
        return subprocess.Popen(
            command,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=None if rank == 0 else sink,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def _end(process: subprocess.Popen) -> None:
    """End a process that we started: first politely, then for good."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _progress(run_folder: Path) -> tuple[int, int]:
    """Return (checkpoints ever committed by step, finished rollout chunks): it changes when anything was achieved."""
    steps = [int(path.name.removeprefix("step_")) for path in (run_folder / "checkpoints").glob("step_??????")]
    return max(steps, default=0), len(list((run_folder / "rollouts").glob("step_*/chunk_*.json")))


def _next_attempt(run_folder: Path) -> int:
    numbers = [int(path.name) for path in (run_folder / "attempts").glob("[0-9]*")]
    return max(numbers, default=0) + 1


def _record_attempt(run_folder: Path, number: int, epoch: int, started: float, reason: str | None) -> None:
    row = {"attempt": number, "epoch": epoch, "started_unix": started, "ended_unix": time.time()}
    artifacts.append_json_line(run_folder / "attempts.jsonl", {**row, "reason": reason or "done"})

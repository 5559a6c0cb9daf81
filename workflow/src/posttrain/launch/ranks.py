"""The trainer ranks of one node as processes: started, watched, and ended by their ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.launch.child import die_with_parent
from posttrain.observability.logging import LOG_VARIABLE
from posttrain.planner.flag import as_environment
from posttrain.planner.megatron_flags import trainer_environment

GRACE_SECONDS = 10.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Ending:
    """Why something of a training job ended before it was done.

    Args:
        what: What ended: "engine 2", "trainer rank 5".
        reason: How, with the end of its log.
        order: Of several endings at about the same time, the lowest is the likeliest cause of the others.
    """

    what: str
    reason: str
    order: int

    ENGINE, KILLED, FAILED = 0, 1, 2

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of all nodes meet."""

    address: str
    port: int


@dataclass
class RankProcess:
    """A trainer rank.

    Args:
        rank: Its number among all.
        process: The process.
        log_path: What it writes.
    """

    rank: int
    process: subprocess.Popen
    log_path: Path

    def ending(self) -> Ending | None:
        """Return how it failed; None while it runs and when it is done."""
        code = self.process.poll()
        if code in (None, 0):
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"trainer rank {self.rank} {how}; its log ends with:\n{_tail(self.log_path)}"
        return Ending(f"trainer rank {self.rank}", reason, Ending.KILLED if code < 0 else Ending.FAILED)


@contextmanager
def running_ranks(
    config: Config, node: int, command: Sequence[str], rendezvous: Rendezvous, folder: Path
) -> Iterator[list[RankProcess]]:
    """Start the trainer ranks of one node and end them with the block.

    Args:
        config: The resolved configuration.
        node: The node's number in the job, from 0.
        command: Arguments of a rank.
        rendezvous: Where all ranks meet.
        folder: Gets `trainer{rank}.log`.
    """
    per_node = config.hardware.gpus_per_node
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size(config)),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        **as_environment(trainer_environment(config)),
    }
    ranks: list[RankProcess] = []
    try:
        for local_rank in range(per_node):
            rank = node * per_node + local_rank
            log_path = folder / f"trainer{rank}.log"
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), LOG_VARIABLE: str(log_path)}
            process = _start(command, {**environment, **own}, log_path, to_terminal=rank == 0)
            ranks.append(RankProcess(rank, process, log_path))
        yield ranks
    finally:
        _end([rank.process for rank in ranks])


def _start(command: Sequence[str], environment: dict[str, str], log_path: Path, to_terminal: bool) -> subprocess.Popen:
    """Start one rank; what rank 0 writes to stderr goes to ours, where its progress bar is seen."""
    with open(log_path, "ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "posttrain.launch.trainer_rank", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=None if to_terminal else sink,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes that we started: first politely, then for good."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])

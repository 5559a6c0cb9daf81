"""The trainer ranks of one node as processes: started, watched, and ended by their ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
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
from posttrain.observability.rank_progress import PROGRESS_VARIABLE, read_progress
from posttrain.planner.flag import as_environment
from posttrain.planner.megatron_flags import trainer_environment
from posttrain.training.early_end import SAVED_EXIT_CODE

GRACE_SECONDS = 10.0
STACK_SECONDS = 2.0
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
        progress_path: Where it says in which phase it is.
    """

    rank: int
    process: subprocess.Popen
    log_path: Path
    progress_path: Path

    @property
    def has_saved(self) -> bool:
        """It was asked to end before the last step, and has."""
        return self.process.poll() == SAVED_EXIT_CODE

    def position(self) -> dict[str, Any] | None:
        """Return where it is, as `hang.Position` has it; None outside of steps."""
        progress = read_progress(self.progress_path) if self.process.poll() is None else None
        if progress is None:
            return None
        return {"step": progress.step, "phase": progress.phase, "seconds": time.monotonic() - progress.since}

    def stack(self) -> str | None:
        """Return where its main thread is; None when it does not answer, as a stopped process does."""
        size = self.log_path.stat().st_size
        self.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(STACK_SECONDS / 10)
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                log.seek(size)
                _, marker, stack = log.read().partition("Current thread")
            if marker and "\n" in stack:
                return stack.partition("\n\n")[0]
        return None

    def ending(self) -> Ending | None:
        """Return how it failed; None while it runs and when it is done."""
        code = self.process.poll()
        if code in (None, 0, SAVED_EXIT_CODE):
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
    with tempfile.TemporaryDirectory(prefix="ranks-") as own_folder:
        try:
            for local_rank in range(per_node):
                rank = node * per_node + local_rank
                log_path = folder / f"trainer{rank}.log"
                progress_path = Path(own_folder) / str(rank)
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), LOG_VARIABLE: str(log_path)}
                own[PROGRESS_VARIABLE] = str(progress_path)
                process = _start(command, {**environment, **own}, log_path, to_terminal=rank == 0)
                ranks.append(RankProcess(rank, process, log_path, progress_path))
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

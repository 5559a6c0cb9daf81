"""The trainer ranks of one node: starts, monitors and ends their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from posttrain.cluster.flight_recorder import ask_for_record, describe_records, record_of, recorder_environment
from posttrain.cluster.hang import SHORTEST_TIMEOUT_SECONDS
from posttrain.cluster.processes import end_processes, start_child
from posttrain.cluster.rendezvous import FILE_VARIABLE
from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.plan.flags.environment import started_with, trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.report.logging import LOG_VARIABLE
from posttrain.report.rank_progress import PROGRESS_VARIABLE, exit_reason_path, read_progress, take_unresponsive_engine
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain.rl.training.graceful_shutdown import SAVED_EXIT_CODE

TRAINER = "posttrain.cluster.trainer_rank"
# `faulthandler` writes in the signal handler, independently of the interpreter: at once or never.
STACK_SECONDS = 2.0
# Enough for the end of a traceback.
LOG_TAIL_LINES = 15
# This file is in the main thread's stack while it waits for a checkpoint.
WRITER_FILE = "rl/training/checkpoint_writer.py"
# A rank that waits in a gloo collective polls, which uses one or two hundredths of a core.
CPU_LOOK_SECONDS, IDLE_SHARE = 5.0, 0.05


@dataclass(frozen=True)
class Ending:
    """Why a process of a training job ended early.

    Args:
        what: The process: "engine 2", "trainer rank 5".
        reason: How it ended, with the end of its log.
        order: Of several simultaneous endings, the lowest is the likeliest cause. `REFUSED` would recur in another
            attempt.
    """

    what: str
    reason: str
    order: int

    REFUSED, ENGINE, KILLED, FAILED = -2, 0, 1, 2

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the ranks of all nodes."""

    address: str
    port: int

    def environment(self, own_folder: Path | None) -> dict[str, str]:
        """Return the environment variables of a rank's rendezvous.

        Args:
            own_folder: Folder of the rendezvous file if all ranks are on one machine, else None.
        """
        if own_folder:
            return {FILE_VARIABLE: str(own_folder / "meeting")}
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


class CpuUse:
    """Measures whether a process and its children used CPU time lately.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._seen: deque[tuple[float, float]] = deque()

    def sample(self) -> None:
        """Record the CPU time so far; does nothing within `CPU_LOOK_SECONDS` of the last sample."""
        now = time.monotonic()
        if self._seen and now < self._seen[-1][0] + CPU_LOOK_SECONDS:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.append((now, self._used()))
        while len(self._seen) > 1 and self._seen[1][0] <= now - SHORTEST_TIMEOUT_SECONDS:
            self._seen.popleft()

    @property
    def is_idle(self) -> bool:
        """Whether at most a twentieth of a core was used in the last `SHORTEST_TIMEOUT_SECONDS`."""
        if not self._seen:
            return False
        (since, before), (now, used) = self._seen[0], self._seen[-1]
        return now - since >= SHORTEST_TIMEOUT_SECONDS and used - before <= IDLE_SHARE * (now - since)

    def _used(self) -> float:
        """Return the CPU seconds of the process and its children, for example compilers."""
        times = [self._process.cpu_times()]
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times.append(child.cpu_times())
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)


@dataclass
class RankProcess:
    """A trainer rank.

    Args:
        rank: Global rank.
        process: The process.
        log_path: Its log.
        progress_path: File to which it writes its phase.
    """

    rank: int
    process: psutil.Popen
    log_path: Path
    progress_path: Path
    _cpu_use: CpuUse = field(init=False)

    def __post_init__(self) -> None:
        self._cpu_use = CpuUse(self.process.pid)

    @property
    def has_saved(self) -> bool:
        """Whether the rank ended on request before the last step, after a save."""
        return self.process.poll() == SAVED_EXIT_CODE

    def position(self) -> dict[str, Any] | None:
        """Return the fields of its `hang.Position`; None outside of steps."""
        progress = read_progress(self.progress_path) if self.process.poll() is None else None
        if progress is None:
            return None
        now = time.monotonic()
        self._cpu_use.sample()
        return {
            "step": progress.step,
            "phase": progress.phase,
            "seconds": now - progress.since,
            "is_idle": now - progress.since > SHORTEST_TIMEOUT_SECONDS and self._cpu_use.is_idle,
            "marks": progress.marks,
            "still": now - progress.moved,
            "usual": progress.usual,
        }

    def silent_engine(self) -> str:
        """Return the URL of an engine that rank 0 newly found unresponsive; empty if none."""
        return take_unresponsive_engine(self.progress_path)

    def ask_for_record(self) -> bool:
        """Trigger a dump of the rank's flight record; return whether a process reads the pipe."""
        return ask_for_record(self.progress_path.parent, self.rank)

    def record(self) -> Path | None:
        """Return the path of its flight record, if it exists."""
        return record_of(self.log_path.parent, self.rank)

    def stack(self) -> str | None:
        """Return the main thread's stack, or all stacks if the main thread waits for the checkpoint writer.

        None if the process does not answer, for example because it is stopped.
        """
        size = self.log_path.stat().st_size
        self.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(STACK_SECONDS / 10)
            with open(self.log_path, encoding="utf-8", errors="replace") as log:
                log.seek(size)
                threads = log.read()
            _, marker, stack = threads.partition("Current thread")
            if marker and "\n" in stack:
                return threads if WRITER_FILE in stack else stack.partition("\n\n")[0]
        return None

    def ending(self) -> Ending | None:
        """Return how the rank failed; None if it runs or succeeded. `Ending.REFUSED` if it rejected its samples.

        Raises:
            CheckpointError: It refused to learn from its samples; another attempt would not help.
        """
        code = self.process.poll()
        if code in (None, 0, SAVED_EXIT_CODE):
            return None
        words = exit_reason_path(self.progress_path)
        if words.exists():
            return Ending(f"trainer rank {self.rank}", words.read_text(encoding="utf-8"), Ending.REFUSED)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        record = f"; {describe_records([path])}" if (path := self.record()) else ""
        reason = f"trainer rank {self.rank} {how}{record}; its log ends with:\n{_tail(self.log_path)}"
        return Ending(f"trainer rank {self.rank}", reason, Ending.KILLED if code < 0 else Ending.FAILED)


@contextmanager
def running_ranks(
    config: Config,
    node: int,
    command: Sequence[str],
    rendezvous: Rendezvous,
    folder: Path,
    engine_secret: str,
    program: str = TRAINER,
) -> Iterator[list[RankProcess]]:
    """Start one node's trainer ranks, or ranks of another program, and end them with the block.

    Args:
        config: The resolved configuration.
        node: The node's number in the job, from 0.
        command: Arguments of a rank.
        rendezvous: The rendezvous of all ranks.
        folder: Gets `trainer{rank}.log`.
        engine_secret: Secret of the engines' requests.
        program: Module that each rank runs.
    """
    per_node = config.hardware.gpus_per_node
    ranks: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as own_folder:
        environment = {
            "WORLD_SIZE": str(world_size(config)),
            **rendezvous.environment(Path(own_folder) if config.nodes == 1 else None),
            **as_environment(trainer_environment(config)),
            SECRET_VARIABLE: engine_secret,
        }
        try:
            for local_rank in range(per_node):
                rank = node * per_node + local_rank
                log_path = folder / f"trainer{rank}.log"
                progress_path = Path(own_folder) / str(rank)
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), LOG_VARIABLE: str(log_path)}
                own |= {PROGRESS_VARIABLE: str(progress_path), **recorder_environment(config, Path(own_folder), folder)}
                process = _start(
                    [program, *command], started_with(os.environ, environment | own), log_path, to_terminal=rank == 0
                )
                ranks.append(RankProcess(rank, process, log_path, progress_path))
            yield ranks
        finally:
            end_processes([rank.process for rank in ranks])


def _start(command: Sequence[str], environment: dict[str, str], log_path: Path, to_terminal: bool) -> psutil.Popen:
    """Start one rank; rank 0's stderr goes to ours, which shows its progress bar."""
    with open(log_path, "ab") as sink:
        argv = [sys.executable, "-m", *command]
        return start_child(argv, env=environment, stdout=sink, stderr=None if to_terminal else sink)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])

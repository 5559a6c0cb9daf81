"""Starts, watches and stops engine processes.

An engine is a separate process group with a log file. It is ended by its id, with its children, never by name.
The kernel ends it if its parent dies (`processes`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from posttrain.cluster.processes import end_processes, start_child
from posttrain.config.schema import Config
from posttrain.plan.flags.environment import started_with
from posttrain.plan.preflight.machine import check_port
from posttrain.plan.preflight.report import raise_problems
from posttrain.rl.engines.launch_command import EngineCommand, render_engine_command
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports
from posttrain.rl.engines.secret import SECRET_VARIABLE, new_secret

log = logging.getLogger(__name__)

# Log lines in an error: the end of a traceback and what precedes it.
NUM_LOG_LINES = 20
EMBEDDED = "posttrain.rl.engines.embedded"


def ended_with_family(argv: Sequence[str]) -> tuple[list[str], signal.Signals]:
    """Return a command whose process ends with its parent, and the signal to end it."""
    if EMBEDDED in argv:
        return [*argv], signal.SIGKILL
    # An external server, which has children.
    return [sys.executable, "-m", "posttrain.cluster.processes", *argv], signal.SIGTERM


class EngineProcess:
    """One engine on this machine.

    Args:
        command: Command and environment.
        log_path: Output file; earlier content is kept.
        name: Name in errors.
        secret: The secret that its clients must send.
    """

    def __init__(self, command: EngineCommand, log_path: Path, name: str, secret: str):
        self._command, self._log_path, self._name, self.secret = command, log_path, name, secret
        self._process: psutil.Popen | None = None
        self._private_folders: list[str] = []

    @property
    def url(self) -> str:
        """URL of the engine."""
        return self._command.url

    @property
    def pid(self) -> int | None:
        """Process id, None before `start`."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the engine, without waiting until it is ready."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        argv, told_by = ended_with_family(self._command.argv)
        # Short names, because a socket path has at most 107 bytes.
        private = {name: tempfile.mkdtemp(prefix="engine-") for name in self._command.private_folders}
        self._private_folders += private.values()
        with open(self._log_path, "ab") as output:
            self._process = start_child(
                argv,
                told_by,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=started_with(os.environ, {**self._command.env, **private, SECRET_VARIABLE: self.secret}),
                start_new_session=True,
            )
        log.info("%s started: process %d, %s, log %s", self._name, self._process.pid, self.url, self._log_path)

    def check_alive(self) -> None:
        """Raise with the end of the log if the process has ended.

        Raises:
            RuntimeError: It has ended; names the engine, its exit code and its log.
        """
        assert self._process is not None, "check_alive before start"
        code = self._process.poll()
        if code is not None:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
            tail = "\n    ".join(lines)
            raise RuntimeError(f"{self._name} ended with exit code {code}; the end of {self._log_path}:\n    {tail}")

    @property
    def has_ended(self) -> bool:
        """Whether the started process is gone."""
        return self._process is not None and self._process.poll() is not None

    def end_hard(self) -> None:
        """Kill it and its children, for an engine that hangs and ignores signals."""
        assert self._process is not None, "end_hard before start"
        end_processes([self._process], grace_seconds=0.0)

    def restart(self) -> None:
        """Restart it with the same command after its remaining processes have ended."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it and its children; idempotent."""
        if self._process is None:
            return
        end_processes([self._process])
        for folder in self._private_folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._process = None
        log.info("%s ended", self._name)


@contextmanager
def running_engines(
    config: Config, model_folder: Path, log_folder: Path, merge_requests: bool = False
) -> Iterator[list[EngineProcess]]:
    """Start the configured number of engines on this machine, reachable only locally, and end them with the block.

    They share a new secret that clients must send (`EngineProcess.secret`). They are not ready yet: wait with
    `EngineClient.wait_ready`, passing `check_all_alive`.

    Args:
        config: The resolved configuration; `engine.port` 0 chooses free ports.
        model_folder: Checkpoint in Hub layout.
        log_folder: Folder for `engine{i}.log`.
        merge_requests: See `render_engine_command`.

    Raises:
        ConfigError: Something else listens on a port that the configuration fixes.
    """
    count, size = config.engine.num_engines, config.engine.gpus_per_engine
    has_gpus = config.hardware.device == "cuda"
    commands = {
        index: render_engine_command(
            config,
            index,
            model_folder,
            LOOPBACK,
            port,
            merge_requests=merge_requests,
            gpus=range(index * size, (index + 1) * size) if has_gpus else (),
        )
        for index, port in enumerate(engine_ports(config, range(count)))
    }
    with started_engines(commands, log_folder, new_secret()) as engines:
        yield engines


def engine_ports(config: Config, indices: Sequence[int], host: str = LOOPBACK, first: int = 0) -> list[int]:
    """Return a port for each of this machine's engines: the configured ones, or free ones.

    Args:
        config: The resolved configuration.
        indices: Numbers of the engines.
        host: Address they listen on.
        first: Where to look for free ports, see `choose_free_ports`.

    Raises:
        ConfigError: Something else listens on a port that the configuration fixes.
    """
    if not config.engine.port:
        return choose_free_ports(len(indices), host, first)
    ports = [config.engine.port + index for index in indices]
    raise_problems([check_port(port, host) for port in ports])
    return ports


@contextmanager
def started_engines(
    commands: Mapping[int, EngineCommand], log_folder: Path, secret: str
) -> Iterator[list[EngineProcess]]:
    """Start engine processes, and end them with the block.

    Args:
        commands: Engine number in the run -> its command on this machine.
        log_folder: Folder for `engine{i}.log`.
        secret: The secret that clients must send.
    """
    engines = [
        EngineProcess(command, log_folder / f"engine{index}.log", f"engine {index}", secret)
        for index, command in commands.items()
    ]
    try:
        for engine in engines:
            engine.start()
        yield engines
    finally:
        # End them in parallel: each takes a second or two.
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            list(pool.map(EngineProcess.stop, engines))


def check_all_alive(engines: Sequence[EngineProcess]) -> None:
    """Raise for the first engine that has ended; see `EngineProcess.check_alive`."""
    for engine in engines:
        engine.check_alive()

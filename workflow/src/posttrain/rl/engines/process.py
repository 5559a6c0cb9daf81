"""Starts, watches and stops engine processes.

An engine is a process group of its own with a log file. It is ended by its id, with its children, never by
its name; and the kernel ends it when the process that started it has died (`processes`).
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

# In an error: the end of a traceback, and what was said before it.
NUM_LOG_LINES = 20
EMBEDDED = "posttrain.rl.engines.embedded"


def ended_with_family(argv: Sequence[str]) -> tuple[list[str], signal.Signals]:
    """Return how an engine is started that ends with who starts it, and which signal tells it so."""
    if EMBEDDED in argv:
        return [*argv], signal.SIGKILL
    # A vendor's server, with children of its own.
    return [sys.executable, "-m", "posttrain.cluster.processes", *argv], signal.SIGTERM


class EngineProcess:
    """One engine on this machine.

    Args:
        command: How to start it.
        log_path: Where its output goes; earlier content is kept.
        name: How errors call it.
        secret: Its clients must show this.
    """

    def __init__(self, command: EngineCommand, log_path: Path, name: str, secret: str):
        self._command, self._log_path, self._name, self.secret = command, log_path, name, secret
        self._process: psutil.Popen | None = None
        self._private_folders: list[str] = []

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._command.url

    @property
    def pid(self) -> int | None:
        """Id of the process, None before `start`."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it; it is not ready yet."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        argv, told_by = ended_with_family(self._command.argv)
        # Short names: a path of a socket has at most 107 bytes.
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
        """Raise with the end of its log when it has ended.

        Raises:
            RuntimeError: Naming the engine, its exit code and its log.
        """
        assert self._process is not None, "check_alive before start"
        code = self._process.poll()
        if code is not None:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
            tail = "\n    ".join(lines)
            raise RuntimeError(f"{self._name} ended with exit code {code}; the end of {self._log_path}:\n    {tail}")

    @property
    def has_ended(self) -> bool:
        """It was started, and its process is gone."""
        return self._process is not None and self._process.poll() is not None

    def end_hard(self) -> None:
        """End it and its children: it hangs, and would not hear that it should."""
        assert self._process is not None, "end_hard before start"
        end_processes([self._process], grace_seconds=0.0)

    def restart(self) -> None:
        """Restart it in the same place after its remaining processes have ended."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it and its children; a second call does nothing."""
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
    """Start the configured number of engines on this machine, for it alone, and end them with the block.

    They obey who knows the secret that is made for them, the same for all (`EngineProcess.secret`). They are not ready
    yet: wait with `EngineClient.wait_ready`, giving it `check_all_alive`.

    Args:
        config: The resolved configuration; `engine.port` 0 chooses free ports.
        model_folder: Checkpoint in Hub layout.
        log_folder: Gets `engine{i}.log`.
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
    """Start engine processes and end them with the block.

    Args:
        commands: Number of the engine in the run -> how it is started here.
        log_folder: Gets `engine{i}.log`.
        secret: Their clients must show this.
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
        # Each takes a second or two to end.
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            list(pool.map(EngineProcess.stop, engines))


def check_all_alive(engines: Sequence[EngineProcess]) -> None:
    """Raise for the first engine that has ended; see `EngineProcess.check_alive`."""
    for engine in engines:
        engine.check_alive()

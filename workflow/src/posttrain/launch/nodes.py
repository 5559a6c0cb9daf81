"""Where a gang runs, and how a process gets onto its nodes: this machine, or the nodes of a scheduler's job."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

from posttrain.engines.ports import LOOPBACK, OWN_PORTS
from posttrain.processes import end_processes, start_child

FIRST_PORT = OWN_PORTS[0]
# What the head has told to end is about to; srun ends a moment after the last of its tasks.
PROCESS_END_SECONDS = 3.0


class NodesLostError(RuntimeError):
    """Too few nodes are left in the allocation."""


class Started(Protocol):
    """A command that was started on nodes."""

    def is_running(self) -> bool:
        """Tell whether it runs on any of them; False as soon as it cannot end well because a node is gone."""

    def end(self) -> None:
        """Wait for an end that is near, and end what then still runs."""


class LocalProcess:
    """A command that was started by one process of this machine, or on it.

    Args:
        process: The process.
    """

    def __init__(self, process: psutil.Popen):
        self._process = process

    def is_running(self) -> bool:
        """Tell whether the process runs."""
        return self._process.poll() is None

    @property
    def has_failed(self) -> bool:
        """The process has ended, and not well."""
        return self._process.poll() not in (None, 0)

    def wait(self) -> None:
        """Return when the process has ended."""
        self._process.wait()

    def end(self) -> None:
        """Wait for the process; one that waits for a dead node never would end."""
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(PROCESS_END_SECONDS)
        end_processes([self._process], PROCESS_END_SECONDS)


class StartedTogether:
    """A command that was started by several processes of this machine, each on other nodes.

    Args:
        parts: The processes.
    """

    def __init__(self, parts: Sequence[LocalProcess]):
        self._parts = parts

    def is_running(self) -> bool:
        """Tell whether any of them runs; False where one has failed."""
        return any(part.is_running() for part in self._parts) and not any(part.has_failed for part in self._parts)

    def end(self) -> None:
        """End one after the other."""
        for part in self._parts:
            part.end()


class Nodes(Protocol):
    """The nodes that a training job may use."""

    address: str
    """Where the head listens."""
    job: str
    """The scheduler's name for the job, the same after it was requeued; empty without a scheduler."""
    first_port: int
    """Ports from here on are the job's; 0: free ones are chosen."""

    def choose(self, count: int) -> list[str]:
        """Return the names of the nodes that train, the ranks' order.

        Raises:
            NodesLostError: Fewer are left.
        """

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> Started:
        """Start a command once on each of the nodes.

        Args:
            names: Of the nodes.
            command: Program and arguments, the same on all.
            environment: Variables to add.
            log_path: What the starting itself has to say.
        """

    def check(self, names: Sequence[str]) -> list[str]:
        """Return which of these nodes do not answer, and do not choose them again."""

    def leave_out(self, names: Sequence[str]) -> None:
        """Do not choose these nodes again, although they answer."""

    def job_is_alive(self, job: str) -> bool | None:
        """Tell whether the scheduler runs a job or will; None where it cannot tell."""

    def end_is_near(self, seconds: float) -> bool:
        """Tell whether the scheduler ends the job within so many seconds; asked all the time."""

    def requeue(self, after: str = "") -> None:
        """Give the nodes back and have the job started again later; does not return.

        Args:
            after: Another job that has to end first, as its lease names it.

        Raises:
            RuntimeError: The site does not allow it, with what to do instead.
            SystemExit: The job is started again because of this process's exit code.
        """

    def give_back(self) -> None:
        """End what was asked of the scheduler for the run beside this job; only who holds the lease may."""


class ThisMachine:
    """One node, and nobody who starts or ends jobs.

    Args:
        name: What its node-local copy is called.
    """

    address, job, first_port = LOOPBACK, "", 0

    def __init__(self, name: str):
        self._name, self._is_left_out = name, False

    def choose(self, count: int) -> list[str]:
        """Return this machine.

        Raises:
            NodesLostError: It was left out.
        """
        assert count == 1, f"{count} nodes on one machine"
        if self._is_left_out:
            raise NodesLostError("there is no other machine")
        return [self._name]

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> LocalProcess:
        """Start the command."""
        return start_here([*command, "--name", *names], environment)

    def check(self, names: Sequence[str]) -> list[str]:
        """Return nothing: this machine answers."""
        return []

    def leave_out(self, names: Sequence[str]) -> None:
        """Choose nothing any more."""
        self._is_left_out = True

    def job_is_alive(self, job: str) -> None:
        """Return None: there is no scheduler."""

    def end_is_near(self, seconds: float) -> bool:
        """Return False: nobody ends it."""
        return False

    def requeue(self, after: str = "") -> None:
        """Raise: there is no queue."""
        raise RuntimeError("run the same command again to go on")

    def give_back(self) -> None:
        """Do nothing: nothing was asked for."""


def start_here(command: Sequence[str], environment: Mapping[str, str], stdout: IO[bytes] | None = None) -> LocalProcess:
    """Start a process of this machine that ends with the thread that starts it.

    Args:
        command: Program and arguments.
        environment: Variables to add.
        stdout: Where its output goes; None: where ours goes.
    """
    return LocalProcess(start_child(command, env={**os.environ, **environment}, stdout=stdout))


def interface_address(interface: str) -> str:
    """Return this host's IPv4 address on an interface; of its own name where none is given.

    Raises:
        RuntimeError: There is no such interface, or it has no address.
    """
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    for address in psutil.net_if_addrs().get(interface, []):
        if address.family == socket.AF_INET:
            return address.address
    known = ", ".join(sorted(psutil.net_if_addrs()))
    raise RuntimeError(f"site.network_interface={interface}: no such interface with an IPv4 address here, only {known}")

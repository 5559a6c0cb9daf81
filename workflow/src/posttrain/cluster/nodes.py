"""Where a gang runs, and how a process gets onto its nodes: this machine, or the nodes of a scheduler's job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

from posttrain.cluster.processes import end_processes, start_child
from posttrain.rl.engines.ports import LOOPBACK, OWN_PORTS

FIRST_PORT = OWN_PORTS[0]
# What the head has told to end is about to; srun ends a moment after the last of its tasks.
PROCESS_END_SECONDS = 3.0


class NodesLostError(RuntimeError):
    """Too few nodes are left in the allocation."""


class Started(Protocol):
    """A command that was started on nodes."""

    def is_running(self) -> bool:
        """Return whether it runs on any of them; False as soon as it cannot end well because a node is gone."""

    def end(self) -> None:
        """Wait for an end that is near, and end what then still runs."""


class StartedHere:
    """A command that processes of this machine run, or have others run on other nodes.

    Args:
        processes: Each for nodes of its own.
    """

    def __init__(self, processes: Sequence[psutil.Popen]):
        self.processes = list(processes)

    def is_running(self) -> bool:
        """Return whether any of them runs; False where one has failed."""
        codes = [process.poll() for process in self.processes]
        return None in codes and not any(codes)

    def end(self) -> None:
        """Wait for an end that is near, and end what then still runs: who waits for a dead node never would."""
        psutil.wait_procs(self.processes, timeout=PROCESS_END_SECONDS)
        end_processes(self.processes, PROCESS_END_SECONDS)


class Scheduler(Protocol):
    """Runs the job in which training runs, and may start it again."""

    job: str
    """Its name for the job, the same after it was requeued; empty without a scheduler."""

    def job_is_alive(self, job: str) -> bool | None:
        """Return whether it runs a job or will; None where it cannot tell."""

    def end_is_near(self, seconds: float) -> bool:
        """Return whether it ends the job within so many seconds; asked all the time."""

    def requeue(self, after: str = "") -> None:
        """Give the nodes back and have the job started again later; does not return.

        Args:
            after: Another job that has to end first, as its lease names it.

        Raises:
            RuntimeError: The site does not allow it, with what to do instead.
            SystemExit: The job is started again because of this process's exit code.
        """

    def give_back(self) -> None:
        """End what was asked of it for the run beside this job; only who holds the lease may."""


class NoScheduler:
    """Nobody starts the job again."""

    job = ""

    def job_is_alive(self, job: str) -> None:
        """Return None: nobody can be asked."""

    def end_is_near(self, seconds: float) -> bool:
        """Return False: nobody ends the job."""
        return False

    def requeue(self, after: str = "") -> None:
        """Raise: there is no queue."""
        raise RuntimeError("run the same command again to go on")

    def give_back(self) -> None:
        """Do nothing: nothing was asked for."""


class Allocation(Protocol):
    """The nodes that a training job may use."""

    address: str
    """Where the head listens."""
    first_port: int
    """Ports from here on are the job's; 0: free ones are chosen."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that gave the nodes."""

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


class ThisMachine:
    """One machine without a scheduler.

    Args:
        name: What its node-local copy is called.
    """

    address, first_port, scheduler = LOOPBACK, 0, NoScheduler()

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
    ) -> StartedHere:
        """Start the command."""
        return start_here([[*command, "--name", *names]], environment)

    def check(self, names: Sequence[str]) -> list[str]:
        """Return nothing: this machine answers."""
        return []

    def leave_out(self, names: Sequence[str]) -> None:
        """Choose nothing any more."""
        self._is_left_out = True


def start_here(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], stdout: IO[bytes] | None = None
) -> StartedHere:
    """Start processes of this machine that end with the thread that starts them.

    Args:
        commands: Program and arguments of each.
        environment: Variables to add.
        stdout: Where their output goes; None: where ours goes.
    """
    variables = {**os.environ, **environment}
    return StartedHere([start_child(command, env=variables, stdout=stdout) for command in commands])


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

"""The nodes of a gang and how processes start on them: this machine, or the nodes of a scheduler's job."""

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
# The supervisors are already ending; srun ends a moment after its last task.
PROCESS_END_SECONDS = 3.0


class NodesLostError(RuntimeError):
    """Too few nodes are left in the allocation."""


class Started(Protocol):
    """A command that was started on several nodes."""

    def is_running(self) -> bool:
        """Return whether it runs on any node; False once a lost node or a failure makes success impossible."""

    def end(self) -> None:
        """Wait briefly for the command to end, then end it."""


class StartedHere:
    """A command run by processes of this machine, some of which (srun) run it on other nodes.

    Args:
        processes: One process per group of nodes.
    """

    def __init__(self, processes: Sequence[psutil.Popen]):
        self.processes = list(processes)

    def is_running(self) -> bool:
        """Return whether any process runs; False once one has failed."""
        codes = [process.poll() for process in self.processes]
        return None in codes and not any(codes)

    def end(self) -> None:
        """Wait briefly for the processes to end, then end them: srun would wait for a dead node for ever."""
        psutil.wait_procs(self.processes, timeout=PROCESS_END_SECONDS)
        end_processes(self.processes, PROCESS_END_SECONDS)


class Scheduler(Protocol):
    """The scheduler of this process's job; may restart it."""

    job: str
    """The scheduler's name of the job, unchanged by a requeue; empty without a scheduler."""

    def job_is_alive(self, job: str) -> bool | None:
        """Return whether a job runs or is queued; None if unknown."""

    def end_is_near(self, seconds: float) -> bool:
        """Return whether the job ends within a number of seconds; called in every poll."""

    def requeue(self, after: str = "") -> None:
        """Release the nodes and restart the job later; does not return.

        Args:
            after: Holder of the lease, a job that has to end first.

        Raises:
            RuntimeError: The site does not allow it; the message has a remedy.
            SystemExit: This process's exit code makes the scheduler restart the job.
        """

    def give_back(self) -> None:
        """Cancel the run's other jobs (spare nodes); only the lease's holder may call this."""


class NoScheduler:
    """No scheduler: the job is never restarted."""

    job = ""

    def job_is_alive(self, job: str) -> None:
        """Return None: there is no scheduler to query."""

    def end_is_near(self, seconds: float) -> bool:
        """Return False: there is no time limit."""
        return False

    def requeue(self, after: str = "") -> None:
        """Raise: there is no queue."""
        raise RuntimeError("run the same command again to go on")

    def give_back(self) -> None:
        """Do nothing: there are no other jobs."""


class Allocation(Protocol):
    """The nodes that a training job may use."""

    address: str
    """Address on which the head listens."""
    first_port: int
    """First of the job's ports; 0: use free ports."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the allocation."""

    def choose(self, count: int) -> list[str]:
        """Return the names of the nodes that train, in the order of ranks.

        Raises:
            NodesLostError: Fewer nodes are left.
        """

    def start(
        self, names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> Started:
        """Start a command once on each of the nodes.

        Args:
            names: Names of the nodes.
            command: Program and arguments, the same on all nodes.
            environment: Variables to add.
            log_path: Gets the output of the launcher itself.
        """

    def check(self, names: Sequence[str]) -> list[str]:
        """Return the nodes that do not answer, and never choose them again."""

    def leave_out(self, names: Sequence[str]) -> None:
        """Never choose these nodes again, although they answer."""


class ThisMachine:
    """One machine without a scheduler.

    Args:
        name: Names this machine, and with it the folder of its node-local copy.
    """

    address, first_port, scheduler = LOOPBACK, 0, NoScheduler()

    def __init__(self, name: str):
        self._name, self._is_left_out = name, False

    def choose(self, count: int) -> list[str]:
        """Return this machine.

        Raises:
            NodesLostError: The machine was left out.
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
        """Return an empty list: this machine answers."""
        return []

    def leave_out(self, names: Sequence[str]) -> None:
        """Make `choose` raise from now on."""
        self._is_left_out = True


def start_here(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], stdout: IO[bytes] | None = None
) -> StartedHere:
    """Start processes on this machine that end with the thread that starts them.

    Args:
        commands: Program and arguments of each.
        environment: Variables to add.
        stdout: Destination of their output; None: this process's stdout.
    """
    variables = {**os.environ, **environment}
    return StartedHere([start_child(command, env=variables, stdout=stdout) for command in commands])


def interface_address(interface: str) -> str:
    """Return this host's IPv4 address on an interface; without an interface, the address of its host name.

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

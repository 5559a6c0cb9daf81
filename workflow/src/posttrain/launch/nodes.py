"""Where a gang runs, and how a process gets onto its nodes: this machine, or the nodes of a scheduler's job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from posttrain.launch.child import die_with_parent

LOOPBACK = "127.0.0.1"


class NodesLostError(RuntimeError):
    """Too few nodes are left in the allocation."""


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
    ) -> subprocess.Popen:
        """Start a command once on each of the nodes; the process ends when they all have, or with them.

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
        """


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
    ) -> subprocess.Popen:
        """Start the command."""
        return subprocess.Popen(
            [*command, "--name", *names],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

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

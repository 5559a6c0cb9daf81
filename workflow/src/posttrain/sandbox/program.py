"""What runs in a sandbox, within which limits, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from posttrain.config.sandbox import SandboxSettings

# Folder inside the sandbox: the working folder, which holds the given files and MAIN.
WORK = "/work"
# The file that holds a Python source.
MAIN = "main.py"
# What helps on a node that forbids sandboxes.
REMEDY = (
    "allow unprivileged user namespaces on this node (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp and "
    "AppArmor profiles), or set sandbox.address to a sandbox service on other nodes (docs/sandbox.md)"
)
Ended = Literal["exit", "time", "memory", "processes", "files", "output", "killed"]


class SandboxUnavailable(RuntimeError):
    """No sandbox can run here. The message says what is missing and what the administrator can do.

    It says nothing about the program, so it must never become a result or a score.
    """


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox; they hold for all its processes together unless stated otherwise.

    Args:
        seconds: Wall time. Each process also has this much CPU time per core.
        memory_mib: Resident memory. Temporary folders have this size limit, too, and count as memory.
        processes: Processes and threads.
        output_kib: Bytes of stdout, and of stderr. A program that prints more is ended.
        open_files: Open files per process.
        files: Files and folders in temporary folders.
    """

    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    output_kib: int = 256
    open_files: int = 256
    files: int = 10_000

    @classmethod
    def of(cls, settings: SandboxSettings) -> Limits:
        """Return the limits of a configuration."""
        return cls(settings.seconds, settings.memory_mib, settings.processes, settings.output_kib)

    @property
    def memory_bytes(self) -> int:
        """The limit of memory in bytes."""
        return self.memory_mib << 20

    @property
    def output_bytes(self) -> int:
        """The limit of each output in bytes."""
        return self.output_kib << 10

    @property
    def cpu_seconds(self) -> int:
        """CPU time of one process: more than enough for one thread, which the wall clock ends first."""
        return math.ceil(self.seconds) + 1


@dataclass(frozen=True)
class Program:
    """A program and its input.

    Args:
        source: Python source, which runs as `/work/main.py`.
        argv: A command in place of a source. The root holds Python alone: `python` stands for its interpreter.
        stdin: Its standard input.
        files: Path below the working folder -> content.

    Raises:
        ValueError: Neither or both of source and command, or a path that leaves the working folder.
    """

    source: str = ""
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.source) == bool(self.argv):
            raise ValueError("a program is either Python source or a command")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"not a path below the working folder: {name!r}")
        if self.source and MAIN in self.files:
            raise ValueError(f"{MAIN} is the source's own file")

    @property
    def all_files(self) -> dict[str, bytes]:
        """The files with the source's own."""
        # A lone surrogate would be no text: Python reports it as the program's error.
        own = {MAIN: self.source.encode("utf-8", "surrogatepass")} if self.source else {}
        return {**self.files, **own}


@dataclass(frozen=True)
class Result:
    """How a program ended.

    Args:
        ended: "exit" (by itself), a limit that ended it, or "killed" (by a signal).
        exit_code: Its exit code, 128 + the signal's number for a signal.
        stdout: Its standard output, cut at the limit.
        stderr: Its standard error, cut at the limit.
        truncated: Names of outputs that were cut.
        seconds: Wall time, with the sandbox's own.
    """

    ended: Ended
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: tuple[str, ...]
    seconds: float

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended == "exit" and self.exit_code == 0


Runner = Callable[[Program, Limits], Coroutine[Any, Any, Result]]
"""Runs a program in a sandbox, here or at a service.

Raises:
    SandboxUnavailable: No sandbox can run.
"""

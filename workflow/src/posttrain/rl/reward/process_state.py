"""Saves and restores a worker's process state, so that nothing leaks from one answer to the next."""

from __future__ import annotations

import _thread
import builtins
import gc
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A grader may keep some files open, such as a cache; more than this is a leak.
MAX_KEPT_FILES = 64
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = (
    *(resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE),
    *(resource.RLIMIT_NPROC, resource.RLIMIT_STACK),
)
_STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process before grading.

    Args:
        folder: The working folder.
        environment: The environment's variables.
        handlers: Signal -> handler.
        limits: Limit of the system -> (soft, hard).
        streams: Standard input, output and error, with copies of their descriptors.
        builtins: Python's built-in names.
        recursion_limit: Python's recursion limit.
        collects: Whether the garbage collector is enabled.
        mask: The umask.
        num_files: Open file descriptors.
        num_threads: Python threads besides the main thread.
    """

    folder: str
    environment: Mapping[str, str]
    handlers: Mapping[int, Any]
    limits: Mapping[int, tuple[int, int]]
    streams: tuple[tuple[Any, int], ...]
    builtins: Mapping[str, Any]
    recursion_limit: int
    collects: bool
    mask: int
    num_files: int
    num_threads: int

    @classmethod
    def now(cls) -> ProcessState:
        """Return the state of this process."""
        streams = tuple((getattr(sys, name), os.dup(number)) for number, name in enumerate(_STREAMS))
        return cls(
            folder=os.getcwd(),
            environment=dict(os.environ),
            handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            streams=streams,
            builtins=vars(builtins).copy(),
            recursion_limit=sys.getrecursionlimit(),
            collects=gc.isenabled(),
            mask=_mask(),
            num_files=_num_files(),
            num_threads=_thread._count(),
        )

    def restore(self) -> str:
        """Restore what is possible; return what is not, "" if the state is fully restored."""
        try:
            self._restore_signals()
            self._restore_interpreter()
            self._restore_streams()
            os.chdir(self.folder)
            if dict(os.environ) != self.environment:
                os.environ.clear()
                os.environ.update(self.environment)
            for limit, both in self.limits.items():
                if resource.getrlimit(limit) != both:
                    resource.setrlimit(limit, both)
            num_files, num_threads = _num_files(), _thread._count()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            return f"a state that cannot be put back ({type(error).__name__}: {error})"
        if num_files > self.num_files + MAX_KEPT_FILES:
            return f"{num_files - self.num_files} open files"
        return f"{num_threads - self.num_threads} running threads" if num_threads > self.num_threads else ""

    def _restore_signals(self) -> None:
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _restore_interpreter(self) -> None:
        vars(builtins).update(self.builtins)
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(self.recursion_limit)
        (gc.enable if self.collects else gc.disable)()
        os.umask(self.mask)

    def _restore_streams(self) -> None:
        for number, (name, (stream, copy)) in enumerate(zip(_STREAMS, self.streams, strict=True)):
            if stream.closed:
                raise ValueError(f"sys.{name} is closed")
            setattr(sys, name, stream)
            os.dup2(copy, number)


def _mask() -> int:
    # The umask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))

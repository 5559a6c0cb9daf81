"""Programs that begin in no time: each is a fork of one process that has imported torch, transformers and Megatron.

The process is that of `multiprocessing`, one a test session, and does nothing but import and fork.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = ["posttrain.training.assembly"]
# OpenMP reads it when it is loaded.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ForkedProgram:
    """A program in a process of its own, with what of `Popen` is needed of it.

    Args:
        program: The path of a script, or the name of a module.
        arguments: Its own.
        variables: Its environment, beyond this process's; OpenMP has one thread.
    """

    def __init__(self, program: Path | str, arguments: Sequence[str], variables: Mapping[str, str]):
        self._output = tempfile.NamedTemporaryFile(prefix="output-")  # noqa: SIM115, as long as this object
        environment = {**os.environ, **variables, **ONE_THREAD}
        words = (str(program), isinstance(program, Path), list(arguments), environment, self._output.name)
        self._process = _context().Process(target=_run, args=words)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of `Popen`."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As of `Popen`."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """As of `Popen`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for its end, and return what it has printed.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        self._process.join(timeout)
        output = Path(self._output.name).read_text()
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout, output)
        return output, None


@functools.cache
def _context() -> ForkServerContext:
    context, before = multiprocessing.get_context("forkserver"), dict(os.environ)
    context.set_forkserver_preload(IMPORTED)
    os.environ |= ONE_THREAD
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


def _run(program: str, is_script: bool, arguments: list[str], environment: dict[str, str], output: str) -> None:
    place = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(place, 1)
    os.dup2(place, 2)
    os.close(place)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ |= environment
    sys.argv = [program, *arguments]
    if is_script:
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)

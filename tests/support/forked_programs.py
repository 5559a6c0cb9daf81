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

IMPORTED = ["posttrain.rl.training.assembly"]
# OpenMP reads it when it is loaded.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ForkedProgram:
    """A program in a process of its own, with what of `Popen` is needed of it.

    Args:
        program: The path of a script, or the name of a module.
        arguments: Its own.
        environment: All of its variables.
        folder: Its working folder; by default that in which the tests began.
        errors_apart: Keep standard error apart from the output.
        log: Gets the output; by default a file that ends with this object.
    """

    def __init__(
        self,
        program: Path | str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        errors_apart: bool = False,
        log: Path | None = None,
    ):
        self._files = tempfile.TemporaryDirectory(prefix="forked-")
        self._output = log or Path(self._files.name, "output")
        self._errors = Path(self._files.name, "errors") if errors_apart else self._output
        words = (str(program), isinstance(program, Path), list(arguments), dict(environment), folder)
        self._process = _context().Process(target=_run, args=(*words, self._output, self._errors))
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

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end, and return its output and, where they are apart, its errors.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        self._process.join(timeout)
        output, errors = (path.read_text() if path.exists() else "" for path in (self._output, self._errors))
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout, output, errors)
        return output, errors if self._errors != self._output else ""


def run_program(
    program: Path | str,
    *words: object,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a script or module to its end; see `ForkedProgram`."""
    arguments = [*map(str, words)]
    process = ForkedProgram(program, arguments, os.environ if environment is None else environment, folder, True)
    try:
        output, errors = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess([str(program), *arguments], process.returncode, output, errors)


def run_posttrain(
    *words: object, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as `python -m posttrain` does."""
    return run_program("posttrain", *words, folder=folder, environment=environment)


def run_step(
    name: str, words: Sequence[object], folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script of a step, with some variables beside those of the environment."""
    program = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    return run_program(program, *words, folder=folder, environment={**os.environ, **environment})


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


def _run(
    program: str,
    is_script: bool,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path | None,
    output: Path,
    errors: Path,
) -> None:
    assert {*IMPORTED} <= sys.modules.keys(), "multiprocessing passes over what it cannot import"
    for number, path in ((1, output), (2, errors)):
        place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(place, number)
        os.close(place)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if folder:
        os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    sys.argv = [program, *arguments]
    if is_script:
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)

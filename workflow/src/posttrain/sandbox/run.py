"""Runs a program in a new bubblewrap sandbox on this machine.

The caller and the first code inside (`posttrain.sandbox.inside`) meet before the program starts. So a sandbox that
cannot be set up is told from a program that fails, and the sandbox of a caller that is killed never starts its program.
Afterwards the kernel ends the sandbox together with the thread that has started it (`--die-with-parent`).

Nothing is stored outside the sandbox: its folders are file systems in its own memory, and disappear with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

from posttrain.errors import one_line
from posttrain.sandbox.bubblewrap import WRITABLE, bwrap_options, find_bwrap
from posttrain.sandbox.cgroup import (
    add_process,
    count_oom_kills,
    find_delegated,
    has_run_out_of_memory,
    limited_cgroup,
)
from posttrain.sandbox.landlock import find_abi, landlock_rules
from posttrain.sandbox.program import MAIN, REMEDY, WORK, Ended, Limits, Program, Result, SandboxUnavailable
from posttrain.sandbox.python_root import find_python
from posttrain.sandbox.seccomp import seccomp_filter
from posttrain.sandbox.watch import Watcher, children_of

# Importing the standard library takes milliseconds, and much longer on a busy machine.
START_SECONDS = 60.0
WATCH_SECONDS = 0.02
_CHUNK_BYTES = 1 << 16
# Address space beyond the memory limit of a process, for mapped libraries and stacks that are never filled.
_ADDRESS_SPACE_BYTES = 256 << 20


async def run(program: Program, limits: Limits) -> Result:
    """Run a program in a sandbox of its own.

    Args:
        program: What runs.
        limits: What it may use. It is ended when it exceeds one.

    Returns:
        How it ended, after all its processes have.

    Raises:
        SandboxUnavailable: No sandbox can be started here.
        ValueError: The files exceed the working folder.
    """
    started = time.monotonic()
    if sum(map(len, program.all_files.values())) > limits.memory_bytes // len(WRITABLE):
        raise ValueError("the files are larger than the working folder: raise sandbox.memory_mib")
    try:
        return await _run(program, limits, started)
    except OSError as error:
        raise SandboxUnavailable(f"this machine cannot run a sandbox now ({error})") from error


async def _run(program: Program, limits: Limits, started: float) -> Result:
    parent = find_delegated()
    with limited_cgroup(parent, limits) if parent else contextlib.nullcontext() as group, _lifeline() as (ours, theirs):
        process = _start(program, limits, theirs)
        theirs.close()
        sandbox = _Sandbox(process, limits, group, ours)
        try:
            await sandbox.await_start()
            return await sandbox.finish(started)
        finally:
            await sandbox.end()


def run_sync(program: Program, limits: Limits) -> Result:
    """Run a program as `run` does, where no event loop runs."""
    return asyncio.run(run(program, limits))


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the caller's and the sandbox's end of a channel."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


@lru_cache
def _first_code() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


def _start(program: Program, limits: Limits, theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start bubblewrap. asyncio's own call would kill it when it is cancelled, see `_Sandbox.end`."""
    root, bwrap = find_python(), find_bwrap()
    rules = seccomp_filter()
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_content(data)) for name, data in program.all_files.items()}
        seccomp = stack.enter_context(_content(rules)) if rules else None
        command = [f"{WORK}/{MAIN}"]
        if program.argv:
            first, *others = program.argv
            command = ["exec", root.python if first == "python" else first, *others]
        python = [root.python, "-S", "-B", "-P", "-c", _first_code(), str(theirs.fileno()), _rlimits(limits)]
        python.append(landlock_rules(root, find_abi()))
        words = [*bwrap_options(root, limits, files, seccomp), "--", *python, *command]
        numbers = (theirs.fileno(), *files.values(), *([] if seccomp is None else [seccomp]))
        stdin, pipe = stack.enter_context(_content(program.stdin)), subprocess.PIPE
        return subprocess.Popen([bwrap, *words], stdin=stdin, stdout=pipe, stderr=pipe, pass_fds=numbers, env={})


@contextlib.contextmanager
def _content(data: bytes) -> Iterator[int]:
    """Yield a file descriptor from which the bytes can be read."""
    number = os.memfd_create("posttrain-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(number, data) if len(data) <= _CHUNK_BYTES else _write_all(number, data)
        os.lseek(number, 0, os.SEEK_SET)
        # A program could keep memory in its input otherwise.
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield number
    finally:
        os.close(number)


def _write_all(number: int, data: bytes) -> None:
    with open(number, "wb", closefd=False) as file:
        file.write(data)


def _rlimits(limits: Limits) -> str:
    """Return the limits of each process in the form that `posttrain.sandbox.inside` reads."""
    values = {
        "CPU": limits.cpu_seconds,
        "AS": limits.memory_bytes + _ADDRESS_SPACE_BYTES,
        "FSIZE": limits.memory_bytes // len(WRITABLE),
        "NOFILE": limits.open_files,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
    }
    # Before Linux 5.14 this limit counts the user's processes outside the sandbox, too.
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):
        values["NPROC"] = limits.processes + 1
    return ",".join(f"{name}={value}" for name, value in values.items())


class _Sandbox:
    """A started sandbox.

    Args:
        process: bubblewrap, which ends with the first process inside.
        limits: What ends the sandbox.
        group: Its cgroup, if it has one.
        ours: The caller's end of the channel to the first process.
    """

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, group: Path | None, ours: socket.socket):
        self._process, self._limits, self._group, self._ours = process, limits, group, ours
        self._init = self._pidfd = -1
        self._exceeded: Ended | None = None
        self._truncated: list[str] = []
        self._oom_kills = count_oom_kills()

    async def await_start(self) -> None:
        """Wait until the sandbox stands, then let its program start.

        Raises:
            SandboxUnavailable: It does not stand.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_SECONDS):
                if await loop.sock_recv(self._ours, 1) != b"r":
                    raise SandboxUnavailable(f"bubblewrap cannot make a sandbox here ({await self._said()}): {REMEDY}")
                (self._init,) = children_of(self._process.pid)
                self._pidfd = os.pidfd_open(self._init)
                if self._group:
                    add_process(self._group, self._init)
                await loop.sock_sendall(self._ours, b"g")
        except TimeoutError as error:
            raise SandboxUnavailable(f"the sandbox did not start within {START_SECONDS:g} s") from error
        except (OSError, ValueError) as error:
            raise SandboxUnavailable(f"the sandbox ended before its program started ({error})") from error

    async def finish(self, started: float) -> Result:
        """Let the program run to its end.

        Args:
            started: When the call began, for its duration.
        """
        watching = asyncio.create_task(self._watch())
        try:
            stdout, stderr = await asyncio.gather(self._read("stdout"), self._read("stderr"))
            # bubblewrap ends when its first process has ended, and that one when the kernel has ended all others.
            code = await self._wait()
        finally:
            watching.cancel()
        ended = self._ended(code)
        if ended in ("exit", "killed"):
            self._check_own_end(code)
        seconds = time.monotonic() - started
        return Result(ended, code, stdout, stderr, tuple(sorted(self._truncated)), seconds)

    def _check_own_end(self, code: int) -> None:
        """Check that the program ended within the sandbox.

        Raises:
            SandboxUnavailable: The sandbox was killed, or the machine ran out of memory when the program was. No
                process inside can kill the first one, or change its limits (`seccomp`).
        """
        try:
            is_own = os.read(self._ours.fileno(), 1) == b"e"
        except OSError:
            is_own = False
        if not is_own:
            raise SandboxUnavailable("the sandbox was ended from outside")
        # A cgroup counts its own kills; the machine's count has those of other sandboxes, too.
        if not self._group and code == 128 + signal.SIGKILL and count_oom_kills() > self._oom_kills:
            raise SandboxUnavailable("the program was killed while the machine ran out of memory")

    async def end(self) -> None:
        """End what still runs, and wait until it has ended.

        If bubblewrap is killed while it sets up its child, the child waits for it forever. So a sandbox that has not
        started its program goes on until its first process finds the channel closed.
        """
        self._kill()
        self._ours.close()
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._wait()
        except TimeoutError:
            for pid in (*children_of(self._process.pid), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    async def _wait(self) -> int:
        """Return bubblewrap's exit code when it has ended."""
        if self._process.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            try:
                number = os.pidfd_open(self._process.pid)
            except OSError:  # no file descriptor is left
                while self._process.poll() is None:
                    await asyncio.sleep(WATCH_SECONDS)
                return self._process.wait()
            loop.add_reader(number, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(number)
                os.close(number)
        return self._process.wait()

    def _ended(self, code: int) -> Ended:
        if self._exceeded:
            return self._exceeded
        if self._group and has_run_out_of_memory(self._group):
            return "memory"
        if code == 128 + signal.SIGXCPU:
            return "time"
        return "killed" if code > 128 else "exit"

    def _exceed(self, limit: Ended) -> None:
        if self._exceeded is None:
            self._exceeded = limit
            self._kill()

    def _kill(self) -> None:
        """Kill the first process, and with it its whole process namespace."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _watch(self) -> None:
        watcher = Watcher(self._init, self._limits)
        until = time.monotonic() + self._limits.seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, WATCH_SECONDS))
            if limit := watcher.exceeded():
                self._exceed(limit)
                return
        self._exceed("time")

    async def _said(self) -> str:
        """Return bubblewrap's own error."""
        return one_line((await self._read("stderr")).decode(errors="replace").strip())

    async def _read(self, name: Literal["stdout", "stderr"]) -> bytes:
        """Return what the program writes, until it has ended."""
        reader, content = asyncio.StreamReader(), bytearray()
        loop, pipe = asyncio.get_running_loop(), getattr(self._process, name)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        with contextlib.closing(transport):
            await self._take(name, reader, content)
        return bytes(content)

    async def _take(self, name: str, reader: asyncio.StreamReader, content: bytearray) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._limits.output_bytes:
                del content[self._limits.output_bytes :]
                if name not in self._truncated:
                    self._truncated.append(name)
                    self._exceed("output")

"""Child processes that end with their parent, and are ended together with their own children.

A killed driver would leave its children running: an orphan could be a second writer, or hold memory and a port. So the
kernel ends our processes when their parent ends, even if they hang outside of Python (Linux's `PR_SET_PDEATHSIG`; it
fires when the parent's thread ends, so that thread waits for the child). A step also follows its workflow driver,
although a shell runs between the two. A program that does not end its own children is started as

    python -m posttrain.cluster.processes COMMAND ...

which ends the command with all its descendants on SIGTERM or SIGINT, and returns the command's exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

DRIVER_VARIABLE = "POSTTRAIN_DRIVER"
# Open requests of the embedded engine get half of it; the next attempt waits until the memory is free.
GRACE_SECONDS = 10.0
# Attempts to remove a folder, and the pause after each.
REMOVALS, REMOVAL_SECONDS = 50, 0.1
# No process waits for orphans, so they need only enough time to handle SIGTERM.
ORPHAN_SECONDS = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(command: Sequence[str], told_by: signal.Signals = signal.SIGKILL, **options: Any) -> psutil.Popen:
    """Start a process without stdin that ends with the thread that starts it.

    Args:
        command: Program and arguments.
        told_by: The signal that the kernel sends when the thread ends.
        options: Options of `subprocess.Popen`.
    """
    dies = partial(die_with_parent, os.getpid(), told_by)
    return psutil.Popen(list(command), stdin=subprocess.DEVNULL, preexec_fn=dies, **options)


def die_with_parent(parent_pid: int, told_by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends; for a child's `preexec_fn`.

    Args:
        parent_pid: The parent's process ID, to detect that it died before this call.
        told_by: The signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, told_by)
    if os.getppid() != parent_pid:
        _end_with(f"parent {parent_pid} is gone")


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends (Linux's `PR_SET_CHILD_SUBREAPER`)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_processes(roots: Sequence[psutil.Process], grace_seconds: float = GRACE_SECONDS) -> None:
    """Send SIGTERM to processes, then to children that remain; kill children that still remain.

    Args:
        roots: Processes that this program started.
        grace_seconds: Time for the processes to end with their children, in seconds.
    """
    families = [_family_of(root) for root in roots]
    _signal(roots, signal.SIGTERM)
    psutil.wait_procs(roots, timeout=grace_seconds)
    _, orphans = psutil.wait_procs([process for family in families for process in family], timeout=0)
    _signal(orphans, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
    _signal(stubborn, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=GRACE_SECONDS)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the temporary files of this process and its children; it is deleted when the process ends.

    A separate process waits for that end, so that the folder is deleted even if this process is killed.

    Args:
        prefix: Prefix of the folder's name.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        ended, alive = os.pipe()
        remover = os.fork()
        if remover == 0:
            _remove_when(ended, alive, Path(name))
        os.close(ended)
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before
            os.close(alive)
            os.waitpid(remover, 0)


def _remove_when(ended: int, alive: int, folder: Path) -> None:
    """Wait until the other end of a pipe is closed, remove a folder, and exit."""
    os.setsid()
    os.close(alive)
    os.read(ended, 1)
    for _ in range(REMOVALS):  # children that end with this process may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(REMOVAL_SECONDS)
    os._exit(0)


def name_driver() -> bool:
    """Set the environment variable by which steps find this driver; called when the Snakefile is parsed.

    Returns:
        Whether it was set before, because this process has parsed the Snakefile already.
    """
    me = f"{socket.gethostname()}:{os.getpid()}"
    before, os.environ[DRIVER_VARIABLE] = os.environ.get(DRIVER_VARIABLE), me
    return before == me


def follow_driver() -> None:
    """Kill this process when the driver on this host ends; a driver on another host is ignored."""
    host, _, pid = os.environ.get(DRIVER_VARIABLE, "").partition(":")
    if host != socket.gethostname() or not pid:
        return
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        _end_with(f"driver {pid} is gone")
        return
    threading.Thread(target=_wait_and_end, args=(descriptor, pid), daemon=True).start()


def run_with_family(command: Sequence[str]) -> int:
    """Run a command; on SIGTERM or SIGINT end it with all its descendants.

    Returns:
        The command's exit code, or 143 after a signal.
    """
    told, parent_pid = (signal.SIGTERM, signal.SIGINT), os.getpid()
    # `sigwait` instead of a handler: no signal can arrive between the start of a child and its registration.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*told, signal.SIGCHLD))

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent(parent_pid)

    child = psutil.Popen(list(command), preexec_fn=begin)
    while child.poll() is None:
        if signal.sigwait((*told, signal.SIGCHLD)) in told:
            end_processes([child])
            return 128 + signal.SIGTERM
    return child.returncode


def _family_of(root: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _wait_and_end(descriptor: int, pid: str) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    _end_with(f"driver {pid} ended")


def _end_with(reason: str) -> None:
    os.write(2, f"ending: {reason}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        sys.exit(run_with_family(sys.argv[1:]))
    except FileNotFoundError as error:
        print(f"{sys.argv[1]} cannot be started: {error}", file=sys.stderr)
        sys.exit(127)

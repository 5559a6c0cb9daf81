"""Processes that end with the one that needs them, and are ended with all that they have started.

A driver that is killed leaves its children behind; an orphan that goes on writing would be a second writer, and one
that goes on serving holds memory and a port. So the kernel ends a process of ours when its parent ends (Linux's
`PR_SET_PDEATHSIG`: when the thread that started it ends, which therefore waits for it), also one that hangs outside of
Python. A step follows the workflow driver that wanted it, although a shell stands between the two. A program that does
not look after its own children is started as

    python -m posttrain.cluster.processes COMMAND ...

which ends the command's whole family when it is told to end, and exits as the command does.
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
# The embedded engine gives open requests half of it; the next attempt waits for processes that need all of it.
GRACE_SECONDS = 10.0
# Tries to remove a folder, with a pause after each.
REMOVALS, REMOVAL_SECONDS = 50, 0.1
# Nobody waits for what a process that has ended left behind; it only has to hear the signal.
ORPHAN_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_child(command: Sequence[str], told_by: signal.Signals = signal.SIGKILL, **options: Any) -> psutil.Popen:
    """Start a process that ends with the thread that starts it, and reads nothing.

    Args:
        command: Program and arguments.
        told_by: The signal by which the kernel tells it of that end.
        options: Of `subprocess.Popen`.
    """
    dies = partial(die_with_parent, os.getpid(), told_by)
    return psutil.Popen(list(command), stdin=subprocess.DEVNULL, preexec_fn=dies, **options)


def die_with_parent(parent_pid: int, told_by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends; for `preexec_fn` of a child.

    Args:
        parent_pid: Who starts it; one that has died before the kernel was asked would never be noticed.
        told_by: The signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, told_by)
    if os.getppid() != parent_pid:
        _end_with(f"parent {parent_pid} is gone")


def end_processes(roots: Sequence[psutil.Process], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask processes to end, then the children that they left behind; kill those children that do not end.

    Args:
        roots: Processes that this program started.
        grace_seconds: Time they have to end themselves and their children.
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
        prefix: Of the folder's name.
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
    """Wait until the other end of a pipe is closed, remove a folder, and end."""
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
    """Tell the steps that this process starts which process to follow; called when the Snakefile is parsed.

    Returns:
        Whether this process has been named before: it has read the Snakefile already, as a module.
    """
    me = f"{socket.gethostname()}:{os.getpid()}"
    before, os.environ[DRIVER_VARIABLE] = os.environ.get(DRIVER_VARIABLE), me
    return before == me


def follow_driver() -> None:
    """End this process at once when the driver on this host ends; a driver on another host is not followed."""
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
    """Run a command until it ends or this process is told to end, which then ends the command's family.

    Returns:
        The command's exit code, 143 where this process was told to end.
    """
    told, parent_pid = (signal.SIGTERM, signal.SIGINT), os.getpid()
    # Waited for, not handled: none can come between two instructions that make a child and know of it.
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

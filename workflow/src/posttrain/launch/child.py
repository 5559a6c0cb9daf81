"""Processes that end with the one that needs them.

A driver that is killed leaves its children behind; an orphan that goes on writing would be a second writer. So every
process of ours ends when its parent does (Linux `PR_SET_PDEATHSIG`), and a step ends when the workflow driver that
wanted it does, although a shell stands between the two.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading

DRIVER_VARIABLE = "POSTTRAIN_DRIVER"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def name_driver() -> bool:
    """Let the steps that this process starts know whom to follow; called when the Snakefile is parsed.

    Returns:
        Whether this process has been named before: it has read the Snakefile already, as a module.
    """
    me = f"{socket.gethostname()}:{os.getpid()}"
    before, os.environ[DRIVER_VARIABLE] = os.environ.get(DRIVER_VARIABLE), me
    return before == me


def follow_driver() -> None:
    """End this process group at once when the driver on this host ends; a driver on another host is not followed."""
    host, _, pid = os.environ.get(DRIVER_VARIABLE, "").partition(":")
    if host != socket.gethostname() or not pid:
        return
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        _end_with(f"driver {pid} is gone")
        return
    threading.Thread(target=_wait_and_end, args=(descriptor, pid), daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; for `preexec_fn` of a child.

    Args:
        parent_pid: Who starts it; one that has died before the kernel was asked would never be noticed.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        _end_with(f"parent {parent_pid} is gone")


def _wait_and_end(descriptor: int, pid: str) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    _end_with(f"driver {pid} ended")


def _end_with(reason: str) -> None:
    os.write(2, f"ending: {reason}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

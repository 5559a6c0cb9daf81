"""A process that ends when the one that started it has died.

An engine outlives a trainer that was killed unless somebody ends it, and then holds memory and a port that
the next attempt needs. The kernel's own way (PR_SET_PDEATHSIG) fires when the *thread* that started the
process ends, which a trainer may well do on purpose; so the parent's id is watched instead: a child whose
parent dies gets another one at once.

The embedded engine watches by itself. Any other server is started under

    python -m posttrain.engines.parent_watch --parent-pid PID -- COMMAND ...

which passes SIGTERM on, ends the command's whole process tree when its parent dies, and exits as the command
does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import psutil

POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0
ORPHAN_SECONDS = 2.0


def end_with_parent(parent_pid: int) -> None:
    """Send this process SIGTERM when its parent is no longer `parent_pid`, and end it hard if it stays.

    Args:
        parent_pid: Id of the process that started this one.
    """
    threading.Thread(target=_wait_and_end, args=(parent_pid,), name="parent watch", daemon=True).start()


def end_process_tree(root: psutil.Process, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask a process to end, then what it left behind, and end hard what does not listen.

    Args:
        root: A process that this program started.
        grace_seconds: Time it has to end itself and its children.
    """
    try:
        family = [root, *root.children(recursive=True)]
        root.terminate()
    except psutil.NoSuchProcess:
        return
    psutil.wait_procs([root], timeout=grace_seconds)
    _, orphans = psutil.wait_procs(family, timeout=0)
    for process in orphans:
        _signal(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
    for process in stubborn:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=grace_seconds)


def run_watched(command: Sequence[str], parent_pid: int) -> int:
    """Run a command until it ends, this process is told to end, or the parent dies.

    Returns:
        The command's exit code, 143 after a signal or the parent's death.
    """
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    child = psutil.Popen(list(command))
    while child.poll() is None:
        if asked.wait(POLL_SECONDS) or os.getppid() != parent_pid:
            end_process_tree(child)
            return 128 + signal.SIGTERM
    return child.returncode


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _wait_and_end(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the command line's command under watch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parent-pid", type=int, required=True, help="process that starts this one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command to run")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        sys.exit(run_watched(command, arguments.parent_pid))
    except FileNotFoundError as error:
        print(f"parent_watch: {command[0]} cannot be started: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()

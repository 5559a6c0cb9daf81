"""What a grader leaves in a process, tried in children of this one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from posttrain.reward.process_state import MAX_KEPT_FILES, ProcessState


def left_by(leave: Callable[[], object]) -> str:
    """Return what cannot be put back in a process after something was done to it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
            state = ProcessState.now()
            leave()
            os.write(theirs, state.restore().encode() or b"nothing")
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        found = told.read()
    os.waitpid(child, 0)
    return found


def keep_files(count: int) -> None:
    for _ in range(count):
        os.dup(2)


@pytest.mark.parametrize(
    ("leave", "left"),
    [
        (lambda: None, "nothing"),
        (lambda: os.close(1), "nothing"),
        (lambda: os.chdir("/"), "nothing"),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "nothing"),
        (lambda: keep_files(MAX_KEPT_FILES), "nothing"),
        (lambda: keep_files(MAX_KEPT_FILES + 1), f"{MAX_KEPT_FILES + 1} open files"),
        (lambda: threading.Thread(target=time.sleep, args=(60,)).start(), "1 running threads"),
        (lambda: sys.stdout.close(), "a state that cannot be put back (ValueError: sys.stdout is closed)"),
    ],
)
def test_what_is_left(leave: Callable[[], object], left: str) -> None:
    assert left_by(leave) == left

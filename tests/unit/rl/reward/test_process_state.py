"""What a grader leaves in a process, tried in children of this one."""

from __future__ import annotations

import builtins
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from posttrain.rl.reward.process_state import ProcessState


def left_by(
    leave: Callable[[], object],
    probe: Callable[[], object] = lambda: "",
    before: Callable[[], object] = lambda: None,
) -> str:
    """Return what cannot be put back in a process after something was done to it, or else what is seen there."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
            before()
            state = ProcessState.now()
            leave()
            os.write(theirs, (state.restore() or str(probe()) or "nothing").encode())
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
        (lambda: keep_files(64), "nothing"),
        (lambda: keep_files(65), "65 open files"),
        (lambda: sleep_in_a_thread(), "1 running threads"),
        (lambda: sys.stdout.close(), "a state that cannot be put back (ValueError: sys.stdout is closed)"),
    ],
)
def test_what_is_left(leave: Callable[[], object], left: str) -> None:
    assert left_by(leave) == left


def sleep_in_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


def test_what_was_there_before_is_not_left() -> None:
    assert left_by(lambda: None, before=sleep_in_a_thread) == "nothing"
    assert left_by(sleep_in_a_thread, before=sleep_in_a_thread) == "1 running threads"
    assert left_by(lambda: keep_files(65), before=lambda: keep_files(65)) == "65 open files"


def test_a_look_at_the_state_leaves_the_mask_of_new_files() -> None:
    seen: list[int] = []
    assert left_by(lambda: seen.append(os.umask(0)), lambda: seen, lambda: os.umask(0o027)) == str([0o027])


def open_elsewhere(number: int) -> None:
    os.dup2(os.open("/dev/full", os.O_RDWR), number)


@pytest.mark.parametrize(
    ("leave", "probe"),
    [
        (lambda: os.chdir("/"), os.getcwd),
        (lambda: os.environ.update(LEFT="1"), lambda: os.environ.get("LEFT")),
        (lambda: os.environ.pop("PATH"), lambda: os.environ["PATH"]),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGUSR1)),
        (lambda: signal.setitimer(signal.ITIMER_REAL, 60), lambda: signal.getitimer(signal.ITIMER_REAL)),
        (lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 60), lambda: signal.getitimer(signal.ITIMER_VIRTUAL)),
        (lambda: signal.setitimer(signal.ITIMER_PROF, 60), lambda: signal.getitimer(signal.ITIMER_PROF)),
        (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}), lambda: signal.pthread_sigmask(0, ())),
        (lambda: setattr(builtins, "print", None), lambda: builtins.print is not None),
        (lambda: sys.settrace(lambda *_: None), sys.gettrace),
        (lambda: sys.setprofile(lambda *_: None), sys.getprofile),
        (lambda: sys.setrecursionlimit(500), sys.getrecursionlimit),
        (gc.disable, gc.isenabled),
        (lambda: os.umask(0o777), lambda: os.umask(0)),
        (lambda: setattr(sys, "stdin", None), lambda: sys.stdin is not None),
        (lambda: open_elsewhere(0), lambda: os.fstat(0).st_ino),
        (lambda: open_elsewhere(1), lambda: os.fstat(1).st_ino),
        (lambda: open_elsewhere(2), lambda: os.fstat(2).st_ino),
        (
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
            lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
        ),
    ],
)
def test_what_is_put_back(leave: Callable[[], object], probe: Callable[[], object]) -> None:
    assert left_by(leave, probe) == left_by(lambda: None, probe)


def test_a_collector_that_does_not_run_is_not_started() -> None:
    gc.disable()
    try:
        assert left_by(gc.enable, gc.isenabled) == "False"
    finally:
        gc.enable()

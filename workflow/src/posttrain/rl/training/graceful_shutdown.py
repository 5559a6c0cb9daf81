"""Graceful shutdown: on SIGUSR1, training saves at the end of the step and exits with a dedicated code.

The node's supervisor sends SIGUSR1 to rank 0 before the scheduler's time limit. A user may send it to the whole job,
which reaches every process, including engines and graders. So the signal is blocked (children inherit that) and never
handled; `is_asked` checks whether it is pending.
"""

from __future__ import annotations

import signal

# Differs from success and from every failure: the state is saved, and steps remain.
SAVED_EXIT_CODE = 85


def block() -> None:
    """Block SIGUSR1 in this thread and in all threads and processes that it starts later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def is_asked() -> bool:
    """Return whether this process was asked to end."""
    return signal.SIGUSR1 in signal.sigpending()

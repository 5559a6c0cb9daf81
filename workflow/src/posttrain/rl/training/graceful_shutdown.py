"""A training that receives SIGUSR1 saves at the end of its step and exits with a dedicated code.

Its node's supervisor asks rank 0 with SIGUSR1, before a scheduler's time limit. A user may send it to the whole job,
and it then reaches every process of it: engines and graders too. So it is blocked, which children inherit, and never
handled: whoever wants to know looks whether it waits.
"""

from __future__ import annotations

import signal

# Told from success and from every failure: the state is saved, and there are steps left.
SAVED_EXIT_CODE = 85


def block() -> None:
    """Keep SIGUSR1 from ending this thread and all threads and processes that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def is_asked() -> bool:
    """Return whether this process was asked to end."""
    return signal.SIGUSR1 in signal.sigpending()

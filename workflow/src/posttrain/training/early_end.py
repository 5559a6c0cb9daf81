"""A training that is asked to end saves at the end of its step and ends with an exit code of its own.

Its node's supervisor asks rank 0 with SIGUSR1: before a scheduler's time limit, or when a user wants the nodes.
"""

from __future__ import annotations

import signal

# Told from success and from every failure: the state is saved, and there are steps left.
SAVED_EXIT_CODE = 85
_asked = False


def listen() -> None:
    """Take note of SIGUSR1 from now on; without this it would end the process."""
    signal.signal(signal.SIGUSR1, _note)


def is_asked() -> bool:
    """Tell whether this process was asked to end."""
    return _asked


def _note(*_: object) -> None:
    global _asked
    _asked = True

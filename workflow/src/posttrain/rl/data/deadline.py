"""A time limit for untrusted code in this process: chat templates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block's Python code after a time limit; works only in the main thread.

    Raises:
        TimeoutError: The time limit has passed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    # The alarm repeats, for code that catches every exception and continues.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)

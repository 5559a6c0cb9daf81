"""How much memory of its own a piece of work takes: pages of mapped files, which the system may drop, do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


def growth_of_anonymous_memory(work: Callable[[], object]) -> int:
    """Return by how many bytes this process's anonymous memory was larger than before, at most, while `work` ran."""
    before = _anonymous_bytes()
    peaks, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peaks.append(_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return max(peaks) - before


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

"""Progress bars for bytes and steps.

On a terminal, one process at a time shows a live bar (rich); two would overwrite each other, so the others print lines.
A log file gets one line every few seconds, instead of thousands of carriage returns.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

log = logging.getLogger(__name__)
# Often enough to show that work continues, and rarely enough to keep a log of hours readable.
LOG_EVERY_SECONDS = 5.0


class ProgressBar:
    """A bar with one task; use it as a context manager and call `advance`.

    Args:
        label: What is being done.
        total: Number of units.
        unit: "bytes" shows size and speed; anything else a count.
        quiet: Show nothing, because another process shows the progress of all.
    """

    def __init__(self, label: str, total: int, unit: str = "bytes", quiet: bool = False):
        self._label, self._total, self._unit, self._quiet = label, total, unit, quiet
        self._done = 0
        self._note = ""
        self._last_log = time.monotonic()
        self._terminal = None if quiet else _take_terminal()
        self._live = Progress(*self._columns(), console=Console(stderr=True)) if self._terminal else None
        self._task = self._live.add_task(label, total=total, note="") if self._live else None

    def __enter__(self) -> ProgressBar:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._terminal is not None:
            self._live.stop()
            os.close(self._terminal)
        elif kind is None and not self._quiet:
            self._log()

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Add `amount` finished units; `note` is shown at the end of the line."""
        self._done += amount
        self._note = note or self._note
        if self._live and self._task is not None:
            self._live.update(self._task, advance=amount, note=self._note)
        elif not self._quiet and time.monotonic() - self._last_log > LOG_EVERY_SECONDS:
            self._log()

    def _log(self) -> None:
        self._last_log = time.monotonic()
        share = 100 * self._done / self._total if self._total else 100.0
        amount = (
            f"{self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB"
            if self._unit == "bytes"
            else (f"{self._done} of {self._total} {self._unit}")
        )
        log.info("%s: %s (%.0f %%) %s", self._label, amount, share, self._note)

    def _columns(self) -> tuple:
        middle = (DownloadColumn(), TransferSpeedColumn()) if self._unit == "bytes" else (MofNCompleteColumn(),)
        return (
            TextColumn("{task.description}"),
            BarColumn(),
            *middle,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )


def _take_terminal() -> int | None:
    """Return a descriptor that locks stderr's terminal for this process's bar, or None if that is not possible."""
    if not sys.stderr.isatty():
        return None
    try:
        # A lock belongs to an open file, and stderr is shared with the parent process: open the terminal anew.
        terminal = os.open(os.ttyname(sys.stderr.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(terminal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(terminal)
        return None
    return terminal

"""Logging set-up of every process: one line per record on stderr, with the time and the role of the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from types import TracebackType
from typing import TextIO

from posttrain.errors import printable

LOG_VARIABLE = "POSTTRAIN_LOG"
CLEAR_LINE = "\r\x1b[2K"


def configure_logging(role: str | None = None) -> None:
    """Send records of level INFO and above to stderr, and to the file that `POSTTRAIN_LOG` names.

    The workflow sets the variable to the rule's log. stderr stays the terminal, so progress bars are live. Uncaught
    exceptions are logged to both; the stack of a crash in native code goes to the file.

    Args:
        role: The process, if several share a log ("trainer 0", "engine 1").
    """
    # If the disk of the log is full, logging must not print its own tracebacks over the terminal's messages.
    logging.raiseExceptions = False
    prefix = f"[{role}] " if role else ""
    handlers: list[logging.Handler] = [TerminalHandler()]
    if log_file := os.environ.get(LOG_VARIABLE):
        os.makedirs(os.path.dirname(log_file) or ".", exist_ok=True)
        file_handler = logging.FileHandler(log_file, encoding="utf-8")
        handlers.append(file_handler)
        stream = file_handler.stream
        assert stream is not None, "it was opened just now"
        faulthandler.enable(stream)
        # The supervisor of a trainer rank sends this signal to get the rank's stack.
        faulthandler.register(signal.SIGUSR2, stream)
    for handler in handlers:
        handler.setFormatter(_Printable(f"%(asctime)s {prefix}%(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=os.environ.get("POSTTRAIN_LOG_LEVEL", "INFO"), handlers=handlers, force=True)
    # The INFO messages of these libraries would drown ours.
    clients = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3")
    for noisy in (*clients, "filelock", "matplotlib", "megatron", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.excepthook = _log_uncaught


class _Printable(logging.Formatter):
    """Escapes control characters, because a log is read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        return printable(super().format(record))


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr: above a progress bar of this process, over a bar of another process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        # A live bar replaces stderr while it is shown.
        self.setStream(sys.stderr)
        clear_line()
        super().emit(record)


def clear_line() -> None:
    """Take a progress bar off the terminal's last line, so that a message does not run into it."""
    if sys.stderr.isatty():
        sys.stderr.write(CLEAR_LINE)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("ended by %s", kind.__name__, exc_info=(kind, error, trace))

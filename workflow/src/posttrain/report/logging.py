"""Logging set-up of every process: one line per record, on stderr, with time and the part that speaks."""

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

    The workflow names its rule's log there. stderr itself stays the terminal, so that progress bars are live. The
    traceback of what nobody catches goes the same way, and the stack of a crash in native code into the file.

    Args:
        role: Who speaks, when several processes share a log ("trainer 0", "engine 1").
    """
    # A log on a full disk must not bury what the terminal shows under tracebacks of its own.
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
        # The supervisor of a trainer rank asks with it where the rank is.
        faulthandler.register(signal.SIGUSR2, stream)
    for handler in handlers:
        handler.setFormatter(_Printable(f"%(asctime)s {prefix}%(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=os.environ.get("POSTTRAIN_LOG_LEVEL", "INFO"), handlers=handlers, force=True)
    # What these libraries say at INFO is about themselves, and buries what we say.
    clients = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3")
    for noisy in (*clients, "filelock", "matplotlib", "megatron", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.excepthook = _log_uncaught


class _Printable(logging.Formatter):
    """Names control characters: a log is read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as it is written."""
        return printable(super().format(record))


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr; on a terminal above a progress bar of its own, and in place of another process's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        # A live bar takes the place of stderr while it is shown.
        self.setStream(sys.stderr)
        clear_line()
        super().emit(record)


def clear_line() -> None:
    """Take a progress bar off the terminal's last line, so that a message does not run into it."""
    if sys.stderr.isatty():
        sys.stderr.write(CLEAR_LINE)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("ended by %s", kind.__name__, exc_info=(kind, error, trace))

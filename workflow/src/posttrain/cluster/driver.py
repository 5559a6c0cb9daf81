"""Prints the failed steps' own error messages last when a driver of the workflow ends.

Snakemake reports a failure with the whole command line, its own exceptions and its cleanup. The step's own error and
remedy are in its log, often screens earlier. So the driver filters Snakemake's log, hides what does not help a user,
and repeats the steps' errors at the end.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snakemake_interface_logger_plugins.common import LogEvent

from posttrain.errors import explain
from posttrain.plan.preflight.storage import require_writable
from posttrain.report.logging import clear_line

log = logging.getLogger(__name__)

# A record in the format of `configure_logging`: time, optional role, level, logger.
_RECORD = re.compile(r"^\d\d:\d\d:\d\d (?:\[[^\]]*\] )?([DIWEC]) [\w.]+: (.*)$")
# Exceptions that Snakemake raises for a failed command; they only repeat the command line.
_OF_A_COMMAND = ("RuleException", "CalledProcessError")
# Snakemake's messages in every run.
_OF_ITSELF = (
    "Assuming unrestricted shared filesystem usage",
    "Using shell:",
    "Provided cores:",
    "Rules claiming more threads",
    "Select jobs to execute",
    "Execute ",
)
# The last error is searched in this much of a log's end: progress bars can make logs of gigabytes.
_LONGEST_LOG_BYTES = 1 << 20
# Notification is the driver's last action: a mail server that does not answer must not block it.
NOTIFICATION_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class FailedStep:
    """A job that failed.

    Args:
        rule: The job's rule.
        log: Its log file.
    """

    rule: str
    log: Path | None


class Ending(logging.Filter):
    """A filter of Snakemake's log that prints errors at the end; one per driver.

    Args:
        shows_commands: The user wants to see commands: no record is hidden.
    """

    def __init__(self, shows_commands: bool = False) -> None:
        super().__init__()
        self._shows_commands = shows_commands
        self._failed: list[FailedStep] = []
        self._last_words: list[Callable[[], str]] = []

    def watch(self, snakemake_logger: logging.Logger) -> None:
        """Filter this logger from now on, and print errors at exit."""
        snakemake_logger.addFilter(self)
        atexit.register(self.speak)

    def add(self, words: Callable[[], str]) -> None:
        """Print a text at exit, below the failures; `words` is called only then, and may return ""."""
        self._last_words.append(words)

    def filter(self, record: logging.LogRecord) -> bool:
        """Record failed jobs; return whether to show Snakemake's record."""
        clear_line()
        event = getattr(record, "event", None)
        if event == LogEvent.JOB_ERROR:
            logs = getattr(record, "log", None) or []
            self._failed.append(FailedStep(str(getattr(record, "rule_name", "")), Path(logs[0]) if logs else None))
            if not self._shows_commands:
                record.shellcmd = None
        # Snakemake shows a traceback if it cannot write its own files.
        error = sys.exc_info()[1] if event == LogEvent.ERROR else None
        if refused := refusal_of(error):
            self.add(lambda: refused)
        if self._shows_commands:
            return True
        if refused and isinstance(error, OSError):
            return False
        is_of_a_command = event == LogEvent.ERROR and getattr(record, "exception", "") in _OF_A_COMMAND
        return not (is_of_a_command or "no backup found" in str(record.msg) or str(record.msg).startswith(_OF_ITSELF))

    def words(self) -> list[str]:
        """Return each failed step's error with its log path, then the added texts."""
        failed = [f"{step.rule} failed: {message_of(step.log)}" for step in self._failed]
        return [*failed, *(said for last in self._last_words if (said := last()))]

    def speak(self) -> None:
        """Print the errors; nothing after a success."""
        if words := self.words():
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True, soft_wrap=True, highlight=False).print(Text("\n\n".join(["", *words]), style="red"))


def notify(command: Sequence[str], run: Path, state: str, words: str) -> None:
    """Run the site's notification command, if any, when a run ends; log its failure as a warning.

    Args:
        command: Words of the command line. Its environment has POSTTRAIN_RUN (the run's folder), POSTTRAIN_STATE and
            POSTTRAIN_MESSAGE.
        run: The run's folder.
        state: "ended", "failed" or "interrupted".
        words: The errors, as text.
    """
    if not command:
        return
    told = {"POSTTRAIN_RUN": str(run.absolute()), "POSTTRAIN_STATE": state, "POSTTRAIN_MESSAGE": words}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            timeout=NOTIFICATION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("site.end_command: %s", error)
        return
    if done.returncode:
        log.warning("site.end_command ended with %d", done.returncode)


def refusal_of(error: BaseException | None) -> str:
    """Return the system error behind Snakemake's failure with a remedy; "" if there was no OSError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    if error is None:
        return ""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        # A failed write has no file name.
        error.filename = str(Path.cwd())
    error.add_note("Snakemake keeps its records where it is started: another folder may be named with `--directory`")
    return explain(error)


def message_of(log: Path | None) -> str:
    """Return the last error in a failed step's log, and the log's path.

    If the step could not write its log, return the disk's current error with a remedy.
    """
    if log is None or not log.exists():
        return "it left no log" + (_refusal_of_disk(log) if log else "")
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LONGEST_LOG_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    errors = [
        (number, match[2]) for number, line in enumerate(lines) if (match := _RECORD.match(line)) and match[1] in "EC"
    ]
    if not errors:
        last = f"; the last line of its log: {lines[-1]}" if lines else ""
        return f"it was ended from outside, or ended without a word{last}\n  log: {log}{_refusal_of_disk(log)}"
    start, text = errors[-1]
    said = [text]
    for line in lines[start + 1 :]:
        if _RECORD.match(line):
            break
        said.append(line)
    if any(line.startswith("Traceback") for line in said):
        said = [said[0], f"  {said[-1]}", "  this is a defect of ours: the whole traceback is in the log"]
    return "\n".join([*said, f"  log: {log}"])


def _refusal_of_disk(log: Path) -> str:
    try:
        require_writable([log])
    except OSError as error:
        return f"\n{explain(error) or error}"
    return ""

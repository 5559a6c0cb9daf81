"""Bars on real terminals: pseudo-terminals of the kernel, with what a program writes to them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time

from posttrain.report.logging import CLEAR_LINE

PROGRAM = """
import logging, os, sys
from posttrain.report.logging import configure_logging
from posttrain.report.progress import ProgressBar
configure_logging()
with ProgressBar(sys.argv[1], 4, "steps") as bar:
    for step in range(4):
        bar.advance(note=f"note {step}")
        if sys.argv[2:]:
            os.write(1, b"begun\\n")
            sys.stdin.readline()
        logging.getLogger("x").info("a message")
"""


def start(terminal: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )


class Screen:
    """A terminal, and what has been written to it: read all the time, or who writes would have to wait."""

    def __init__(self) -> None:
        self._screen, self.terminal = pty.openpty()
        self._read = b""
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def _keep_reading(self) -> None:
        while True:
            self._read += os.read(self._screen, 65536)

    def text(self, holds: str) -> str:
        """Return all that was written, as soon as it holds something."""
        until = time.monotonic() + 60
        while holds not in self._read.decode(errors="replace"):
            assert time.monotonic() < until, self._read.decode(errors="replace")
            time.sleep(0.02)
        return self._read.decode(errors="replace")


def test_a_message_stands_on_a_line_of_its_own() -> None:
    screen = Screen()
    start(screen.terminal, "work").communicate(timeout=60)
    lines = screen.text(holds="4/4").split("\r\n")
    messages = [line for line in lines if line.endswith("a message")]
    assert len(messages) == 4
    assert all("work" not in line.rpartition(CLEAR_LINE)[2] for line in messages), lines
    assert any("4/4" in line for line in lines)


def test_of_two_processes_on_one_terminal_one_has_a_bar() -> None:
    screen = Screen()
    first = start(screen.terminal, "first", "waits")
    assert first.stdout.readline() == "begun\n"
    start(screen.terminal, "second").communicate(timeout=60)
    both = screen.text(holds="second: 4 of 4 steps (100 %)")
    assert "first" in both.partition("second")[0]
    assert "second \x1b" not in both
    first.communicate("\n" * 4, timeout=60)
    start(screen.terminal, "third").communicate(timeout=60)
    assert "third \x1b[90m━" in screen.text(holds="third"), "the terminal is free again"


def test_a_log_has_no_control_characters() -> None:
    command = [sys.executable, "-c", PROGRAM, "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "work: 4 of 4 steps (100 %) note 3" in done.stderr
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr

"""What a process says reaches its log file, its last words included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SAYS = "from posttrain.report.logging import configure_logging; configure_logging('trainer 3'); "


def run(code: str, log: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "POSTTRAIN_LOG": str(log)}
    return subprocess.run(
        [sys.executable, "-c", SAYS + code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_record_goes_to_stderr_and_to_the_file(tmp_path: Path) -> None:
    ended = run("import logging; logging.getLogger('part').warning('low on %s', 'disk')", tmp_path / "a" / "log")
    assert ended.returncode == 0
    assert "[trainer 3] W part: low on disk\n" in ended.stderr
    assert (tmp_path / "a" / "log").read_text() == ended.stderr


def test_a_traceback_that_nobody_catches_is_in_the_file(tmp_path: Path) -> None:
    ended = run("{}['missing']", tmp_path / "log")
    assert ended.returncode == 1
    assert "KeyError: 'missing'" in ended.stderr
    assert (tmp_path / "log").read_text() == ended.stderr


def test_a_crash_in_native_code_leaves_its_stack(tmp_path: Path) -> None:
    ended = run("import ctypes; ctypes.string_at(0)", tmp_path / "log")
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "log").read_text()

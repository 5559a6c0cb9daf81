"""How programs end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [*sorted(ROOT.glob("scripts/*.py")), ROOT / "workflow/src/posttrain/__main__.py"]
# Sends this process what Ctrl-C sends, when it begins to import the first module that takes time.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "torch" or name.startswith("posttrain."):
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TWICE = """
import os, signal, sys, threading, time
from posttrain import cli

def work():
    threading.Thread(target=time.sleep, args=(1.0,)).start()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
cli.run(work)
"""


def run_interrupted(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.stem)
def test_a_script_that_is_interrupted_while_it_imports_says_one_line(script):
    ended = run_interrupted(INTERRUPTED, script)
    assert ended.stderr == f"{script.name}: interrupted; run the same command again to go on\n"
    assert ended.returncode == -2


def test_a_second_ctrl_c_adds_nothing():
    ended = run_interrupted(TWICE)
    (line,) = ended.stderr.splitlines()
    assert line.endswith("interrupted; run the same command again to go on")
    assert ended.returncode == 1

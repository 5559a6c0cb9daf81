"""`posttrain serve` as a user starts it: a command, and a server of its own in the foreground."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support.forked_programs import run_posttrain

SECRET = "of those who may ask"
EMBEDDED = ("--engine", "embedded", "--hardware", "cpu")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "POSTTRAIN_ENGINE_SECRET": SECRET, **more}


def serve(folder: Path, *words: object, code: int = 0) -> str:
    done = run_posttrain("serve", *words, folder=folder, environment=environment())
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def serving(folder: Path, *words: object, until: str = "ready at") -> Iterator[subprocess.Popen[bytes]]:
    """A server in the foreground that says it is ready; ended hard where the block has left it, and nobody stays."""
    log = folder / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "posttrain", "serve", *map(str, words)]
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while until not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        yield process
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []

"""Runs unit tests over a copy of the library with one mutant in it.

A server process has imported what takes long (torch, Megatron, pytest) and nothing of ours; each run is a fork of it
that finds the copy first on its path, and so do the processes that a test starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.mutants.operators import Mutant
from tests.mutants.targets import TARGETS
from tests.support.workflow_runs import ROOT

LIBRARY = ROOT / "workflow" / "src" / "posttrain"
# Longer than any of the tests takes on a busy machine: a mutant that hangs is found, too.
TIMEOUT_SECONDS = 120
SERVER = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import pytest, _pytest.assertion.rewrite
import numpy, torch, safetensors.torch, transformers, psutil, aiohttp, omegaconf, xxhash, hypothesis
import megatron.core, megatron.core.optimizer, megatron.core.models.gpt, megatron.core.distributed
import megatron.core.pipeline_parallel, megatron.core.dist_checkpointing
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        output = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(call["timeout"])
        words = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(call["timeout"]), *call["tests"]]
        os._exit(pytest.main(words))
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class MutantRunner:
    """A copy of the library, and a process that runs tests over it, one mutant at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._library = Path(self._folder.name) / "posttrain"
        shutil.copytree(LIBRARY, self._library, ignore=shutil.ignore_patterns("__pycache__"))
        self._output = Path(self._folder.name) / "output.txt"
        # Two versions of a module may have the same time and size: nobody may keep what it was compiled to.
        environment = {**os.environ, "PYTHONPATH": self._folder.name, "PYTHONDONTWRITEBYTECODE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, self._folder.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def try_mutant(self, module: str, mutant: Mutant) -> str:
        """Return "killed", or "survived", of a mutant under the tests of its module."""
        path = self._library / f"{module}.py"
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return "survived" if self.run(TARGETS[module]) == 0 else "killed"
        finally:
            path.write_text(source)

    def run(self, tests: tuple[str, ...]) -> int:
        """Return how pytest ends: 0 when all tests pass."""
        call = {"tests": list(tests), "output": str(self._output), "timeout": TIMEOUT_SECONDS}
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(call) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def output(self) -> str:
        """Return what the last tests said."""
        return self._output.read_text()

    def close(self) -> None:
        """End the process and delete the copy."""
        self._server.communicate()
        self._folder.cleanup()


@cache
def fingerprint(module: str) -> str:
    """Return a hash of a module and of the tests that judge it."""
    places = [ROOT / name.partition("::")[0] for name in TARGETS[module]]
    tests = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    state = hashlib.sha256((LIBRARY / f"{module}.py").read_bytes())
    for path in tests:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]

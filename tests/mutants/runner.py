"""Runs unit tests over a copy of the library with one mutant in it.

A server process imports what the tests need; each run is a fork of it that imports the mutant, whatever imports it and
the tests anew. Tests that found mutants before come first: neighbouring mutants are often found by the same test. The
copy comes first on the path, also of the processes that a test starts.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
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

LIBRARY = ROOT / "workflow" / "src"
# Longer than any of the tests takes on a busy machine: a mutant that hangs is found, too.
TIMEOUT_SECONDS = 120
# A loop that does not end any more may collect without end, too.
MEMORY_BYTES = 8 << 30
SERVER = """
import contextlib, gc, io, json, os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import pytest, _pytest.assertion.rewrite
import numpy, torch, safetensors.torch, transformers, psutil, aiohttp, omegaconf, xxhash, hypothesis
import sympy, latex2sympy2_extended, httpx2, reasoning_gym, datasets
import megatron.core, megatron.core.optimizer, megatron.core.models.gpt, megatron.core.distributed
import megatron.core.pipeline_parallel, megatron.core.dist_checkpointing
class KillersFirst:
    def __init__(self, output):
        self.found = output + ".failed"
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: killers.index(item.nodeid) if item.nodeid in killers else len(killers))
    def pytest_runtest_logreport(self, report):
        if report.failed:
            with open(self.found, "w") as file:
                file.write(report.nodeid)
    def keep(self):
        if os.path.exists(self.found):
            with open(self.found) as file:
                killer = file.read()
            os.remove(self.found)
            killers[:] = [killer, *(other for other in killers if other != killer)]

collected, killers = set(), []
print("ready", flush=True)
for line in sys.stdin:
    call = json.loads(line)
    words = ["-q", "-p", "no:cacheprovider", "-m", "not faults", *call["tests"]]
    if not collected.issuperset(call["tests"]):
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", *words])
        collected.update(call["tests"])
    order = KillersFirst(call["output"])
    gc.freeze()  # a fork collects nothing of what it shares
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        output = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(call["timeout"])
        resource.setrlimit(resource.RLIMIT_DATA, (call["memory"], call["memory"]))
        for name in [*sys.modules]:
            if name in call["stale"] or name.split(".")[0] == "tests":
                del sys.modules[name]
                # `from package import module` takes what the package has before it looks for a file.
                package, _, own = name.rpartition(".")
                if package in sys.modules:
                    vars(sys.modules[package]).pop(own, None)
        os._exit(pytest.main(["-x", "--timeout", str(call["timeout"]), *words], [order]))
    _, status = os.waitpid(child, 0)
    order.keep()
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
        copied = Path(self._folder.name)
        self._library = copied / LIBRARY.relative_to(ROOT)
        # The library finds its configuration and environments by its own place.
        for folder in (ROOT, ROOT / "workflow"):
            (copied / folder.relative_to(ROOT)).mkdir(exist_ok=True)
            for path in {*folder.iterdir()} - {LIBRARY, *LIBRARY.parents}:
                (copied / path.relative_to(ROOT)).symlink_to(path)
        shutil.copytree(LIBRARY, self._library, ignore=shutil.ignore_patterns("__pycache__"))
        self._output = Path(self._folder.name) / "output.txt"
        # Two versions of a module may have the same time and size: nobody may keep what it was compiled to.
        environment = {**os.environ, "PYTHONPATH": str(self._library), "PYTHONDONTWRITEBYTECODE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self._library)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        assert self._server.stdout
        self._server.stdout.readline()

    def try_mutant(self, module: str, mutant: Mutant) -> str:
        """Return "killed", or "survived", of a mutant under the tests of its module."""
        path = file_of(module, self._library)
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return "survived" if self.run(module) == 0 else "killed"
        finally:
            path.write_text(source)

    def run(self, module: str) -> int:
        """Return how pytest ends: 0 when all tests of a module pass."""
        call = {
            "tests": list(TARGETS[module]), "stale": sorted(dependents(module)),
            "output": str(self._output), "timeout": TIMEOUT_SECONDS, "memory": MEMORY_BYTES,
        }  # fmt: skip
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


def file_of(module: str, library: Path = LIBRARY) -> Path:
    """Return the file of a target, which names its annex or lies in `posttrain`."""
    return library / f"{module if module.startswith('posttrain_') else f'posttrain/{module}'}.py"


@cache
def dependents(module: str) -> set[str]:
    """Return the names of a module and of all that import it, directly or not: what a fork may not keep."""
    stale, imports = {_name_of(file_of(module))}, _imports()
    while more := {name for name, imported in imports.items() if name not in stale and not stale.isdisjoint(imported)}:
        stale |= more
    return stale


@cache
def _imports() -> dict[str, set[str]]:
    """Return what each module of the library imports of it, packages included."""
    found = {}
    for path in LIBRARY.rglob("*.py"):
        name = _name_of(path)
        wanted = {name.rpartition(".")[0]}
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[name] = {part for long in wanted for part in itertools.accumulate(long.split("."), "{}.{}".format)}
    return found


def _name_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def fingerprint(module: str) -> str:
    """Return a hash of a module and of the tests that judge it."""
    places = [ROOT / name.partition("::")[0] for name in TARGETS[module]]
    tests = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    state = hashlib.sha256(file_of(module).read_bytes())
    for path in tests:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]

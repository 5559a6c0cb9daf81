"""The parts of `make test-faults`: each runs alone, goes on where it was interrupted, and stays under an hour.

A test says with `@pytest.mark.faults("kills")` to which part it belongs. One that has passed is not run again as long
as no file of the code, the configuration or the tests has changed; a test of many events keeps a `Count`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.support.workflow_runs import ROOT

PARTS = {
    "kills": "SIGKILL in every rule, 20 times each",
    "training": "SIGKILL of the driver, the supervisor, trainer and engines; results that are full",
    "rollouts": "engines that die within rollouts, 200 of our own and 20 of SGLang",
    "queued": "SIGKILL of ranks and engines while engines run ahead, 200 in all modes together",
    "agents": "SIGKILL of everything that trains agents in synchronous steps, sandboxes included, 100 times",
    "ahead": "SIGKILL of everything that trains a model on groups that run ahead, 200 in all modes together",
    "families": "SIGKILL of the ranks of every family in every phase of a step",
    "layouts": "every family in every product of layouts on two and four ranks",
    "images": "power cuts in every step and in training",
    "bits": "flipped bits in everything that receipts name",
    "answers": "every target after a changed key of every section",
    "nodes": "nodes of a SLURM lost, slowed down, without disk",
    "queue": "what a SLURM's queue does: scancel, time limits, drivers, users, preflight",
    "rehearsal": "recipes and seeded faults, rehearsed on devices that are said to be there (`make env-rehearsal`)",
    "rehearsal-plan": "the plan's memory against the rehearsal's, of 30 combinations",
    "transfer": "messages of a weight transfer dropped, repeated, cut, spoiled or forged; members that end in it",
    "bridge": "conversions of every family compared with megatron-bridge's (`make env-bridge`)",
    "engines": "small checkpoints served by SGLang, vLLM and the embedded engine, held against transformers",
    "environments": "public environments of OpenEnv, NeMo Gym and verifiers (`make env-environments`)",
    "lm-eval": "lm-eval's answers compared with our own evaluation's (`make env-lm-eval`)",
    "python312": "parity and the demo on Python 3.12 (`make env-python312`)",
    "imports": "300 generated launch scripts and every case, held against bash itself",
    "configs": "every key of every family's config.json changed; what changes transformers' outputs is rejected",
    "graders": "10,000 hostile responses and a bystander",
    "statistics": "error rates and power of the intervals of changes, over 64 to 512 prompts x 1 to 16 samples",
    "sandbox": "programs that take more time than their sandbox gives them, and SIGKILL of their callers, 100 times",
    "slow": "whole runs that take too long for every change",
    "mutants": "edits of the modules that decide, which the unit tests have to notice",
}
FOLDER = ROOT / ".test-results"
PASSED = FOLDER / "passed.json"


@functools.cache
def fingerprint() -> str:
    """Return a hash of all code, configuration and tests."""
    state = hashlib.sha256()
    for name in ("Snakefile", "config", "scripts", "tests", "workflow", "envs", "pyproject.toml"):
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and "egg-info" not in str(file):
                state.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return state.hexdigest()[:16]


def part_of(item: pytest.Item) -> str:
    """Return the part that a test belongs to; empty for one that runs at every change."""
    mark = item.get_closest_marker("faults")
    if mark is None:
        return ""
    (part,) = mark.args or ("",)
    assert part in PARTS, f"{item.nodeid}: faults({part!r}); the parts are {', '.join(PARTS)}"
    return part


def select(items: list[pytest.Item], part: str, anew: bool) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return (tests to run, tests that are left out): of one part, and without those that have passed on this code."""
    passed = _read()
    wanted = [item for item in items if not part or part_of(item) == part]
    fresh = [item for item in wanted if anew or not part_of(item) or passed.get(item.nodeid) != fingerprint()]
    return fresh, [item for item in items if item not in fresh]


def has_passed(nodeid: str) -> bool:
    """Tell whether a test has passed on this code."""
    return _read().get(nodeid) == fingerprint()


def note_passed(nodeid: str) -> None:
    """Remember that a test has passed on this code."""
    FOLDER.mkdir(exist_ok=True)
    _write(PASSED, {**_read(), nodeid: fingerprint()})


class Count:
    """A count that survives the end of its test: rows of plain data, and a folder of its own.

    Args:
        name: Of the test.
    """

    def __init__(self, name: str):
        home = FOLDER / "counts" / name
        self._path, self.folder = home / f"{fingerprint()}.json", home / fingerprint()
        if not self._path.exists():
            shutil.rmtree(home, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = json.loads(self._path.read_text()) if self._path.exists() else []

    def add(self, rows: Iterable[dict]) -> None:
        """Keep what was counted."""
        self.rows += rows
        _write(self._path, self.rows)

    def forget(self) -> None:
        """Delete everything: the test has passed."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)


def _read() -> dict[str, str]:
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def _write(path: Path, content: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)

"""Parity and the demo in a fresh clone, on Python 3.12."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT, WorkflowFolder

CLONE = ROOT / ".envs" / "python312"
PYTHON = CLONE / ".venv" / "bin" / "python"

pytestmark = pytest.mark.faults("python312")


def run(*command: object, folder: Path = CLONE) -> str:
    """Run a command as in a new shell and return what it printed; fails the test when the command fails."""
    mine = ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH", "REQUIRE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(words)}:\n{(ended.stdout + ended.stderr)[-6000:]}"
    return ended.stdout


@pytest.fixture(scope="module", autouse=True)
def fresh_clone() -> None:
    """Make the clone what a new one of this working tree would be; only its environment stays."""
    ready = (CLONE / ".venv" / ".ready").exists()
    require("python312", "" if ready else "no clone with Python 3.12: `make env-python312`")
    commit = run("git", "stash", "create", folder=ROOT).strip() or "HEAD"
    run("git", "fetch", "--quiet", ROOT, commit)
    run("git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
    run("git", "clean", "--quiet", "-dffx", "--exclude", ".venv")
    run("make", f"PYTHON={PYTHON}", "env")
    assert run(PYTHON, "--version").startswith("Python 3.12.")


def test_the_trainer_computes_what_transformers_does() -> None:
    printed = run(PYTHON, "-m", "pytest", "tests/unit/rl/megatron_backend", "-m", "not faults", "-q")
    assert " passed" in printed


def test_the_demo_learns() -> None:
    run("make", f"PYTHON={PYTHON}", "demo")
    summary = WorkflowFolder(CLONE, CLONE / "resources").summary
    assert 0.2 < summary["pass_rate_before"] < 0.3
    assert summary["pass_rate_after"] > 0.88

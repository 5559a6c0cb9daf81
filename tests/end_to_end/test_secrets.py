"""Secrets of the environment are in no file, output or command line of a whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.canaries import CANARIES, command_lines, found_below, found_in
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow


def test_no_secret_leaves_the_environment(undisturbed: WorkflowFolder, store: Path) -> None:
    assert undisturbed.environment.items() >= CANARIES.items(), "the run had them"
    printed = undisturbed.folder / "printed.txt"
    assert "steps (100%) done" in printed.read_text()
    assert len(list(undisturbed.folder.rglob("*"))) > 100
    seen = (undisturbed.folder / "command-lines.txt").read_text()
    assert "posttrain.cluster.trainer_rank" in seen
    assert found_in(seen) == []
    assert found_below([undisturbed.folder, store]) == []


def test_a_secret_that_gets_out_is_found(tmp_path: Path) -> None:
    for number, value in enumerate(CANARIES.values()):
        (tmp_path / f".hidden{number}").write_bytes(b"\xff" + value.encode())
    assert sorted(name for _, name in found_below([tmp_path])) == sorted(CANARIES)
    value = CANARIES["HF_TOKEN"]
    with command_lines() as seen:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)", value], check=True)
    assert found_in("\n".join(seen)) == ["HF_TOKEN"]

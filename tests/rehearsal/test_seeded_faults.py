"""Faults that only GPUs would show, as patches of the library: each is found, with its place."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.planner.resolve import resolve
from posttrain.rehearsal.start import rehearse

FAULTS = sorted((ROOT / "tests" / "rehearsal_faults").glob("*.patch"))
LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.expert_model_parallel_size": 2,
}


def rehearsed(library: Path | None = None, **layout: Any) -> dict[str, Any]:
    require("rehearsal", "" if (ROOT / ".envs/rehearsal/.ready").exists() else "`make env-rehearsal` was not run")
    words = " ".join(f"{key}={value}" for key, value in (LAYOUT | layout).items())
    resolved = resolve({"site": "local", "model": "tiny", "hardware": "h100", "set": words}, CONFIG_DIR)
    return rehearse(resolved, library)


def field(patch: Path, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", patch.read_text(), re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.faults("rehearsal")
def test_what_has_no_fault_has_no_problem() -> None:
    found = rehearsed()
    assert found["problems"] == []
    assert not [row for row in found["waits"] if "rope_utils" in row["place"]]
    assert len(found["ranks"]) == 6


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize("patch", FAULTS, ids=lambda path: path.stem)
def test_a_fault_is_found(patch: Path, tmp_path: Path) -> None:
    library = tmp_path / "src"
    shutil.copytree(ROOT / "workflow" / "src", library, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run(["patch", "-p1", "-s", "-i", str(patch)], cwd=library, check=True)
    layout = dict(word.split("=") for word in field(patch, "set").split())
    found = rehearsed(library, **layout)
    kind, words = field(patch, "finds").split(": ", 1)
    told = {"problem": found["problems"], "wait": found["waits"]}[kind]
    for word in words.split("; "):
        assert re.search(word, str(told)), f"{word} is not in {told}"

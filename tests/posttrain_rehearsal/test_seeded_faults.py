"""Faults that only GPUs would show, as patches of the library: each is found, with its place.

A patch's head says what is wrong, what is to be found, what is set for it, and where others have met such a fault.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.rehearsals import rehearsed
from tests.support.workflow_runs import ROOT

FAULTS = sorted(Path(__file__).with_name("faults").glob("*.patch"))
LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.expert_model_parallel_size": 2,
}
PROJECTS = "NVIDIA/Megatron-LM|NVIDIA-NeMo/RL|THUDM/slime|radixark/miles|verl-project/verl"
LINK = re.compile(rf"https://github\.com/({PROJECTS})/(issues|pull)/\d+")


def rehearsed_with(changes: str, library: Path | None = None) -> dict[str, Any]:
    layout = LAYOUT | dict(word.split("=") for word in changes.split())
    words = " ".join(f"{key}={value}" for key, value in layout.items())
    return rehearsed(library, model="tiny", hardware="h100", set=words)


def field(patch: Path, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", patch.read_text(), re.MULTILINE)
    return found[1] if found else ""


def expected(patch: Path) -> tuple[str, list[str]]:
    """Return where the fault is told, and the expressions that each have to be there."""
    kind, words = field(patch, "finds").split(": ", 1)
    return {"problem": "problems", "wait": "waits"}[kind], words.split("; ")


def test_faults_of_others_are_linked():
    links = [link for patch in FAULTS if (link := field(patch, "see"))]
    assert len(FAULTS) >= 30
    assert len({*links}) == len(links) >= 12
    assert [link for link in links if not LINK.fullmatch(link)] == []


@pytest.mark.parametrize("patch", FAULTS, ids=lambda path: path.stem)
def test_a_fault_is_one_of_this_code(patch):
    words = ["patch", "-p1", "-s", "--dry-run", "--fuzz=0", "-i", str(patch)]
    subprocess.run(words, cwd=ROOT / "workflow" / "src", check=True)
    assert expected(patch)[1]


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize("changes", sorted({field(patch, "set") for patch in FAULTS}))
def test_what_has_no_fault_has_no_problem(changes: str) -> None:
    found = rehearsed_with(changes)
    assert found["problems"] == []
    assert len(found["ranks"]) >= 4
    of_waits = [words for where, words in map(expected, FAULTS) if where == "waits"]
    assert not [words for words in of_waits if all(re.search(word, str(found["waits"])) for word in words)]


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize("patch", FAULTS, ids=lambda path: path.stem)
def test_a_fault_is_found(patch: Path, tmp_path: Path) -> None:
    library = tmp_path / "src"
    shutil.copytree(ROOT / "workflow" / "src", library, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run(["patch", "-p1", "-s", "-i", str(patch)], cwd=library, check=True)
    where, words = expected(patch)
    told = rehearsed_with(field(patch, "set"), library)[where]
    for word in words:
        assert re.search(word, str(told)), f"{word} is not in {told}"

"""A rehearsal that is killed: what an earlier one has told stays, and nothing else is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.store import read_json, write_json, write_text
from posttrain_rehearsal.start import VARIABLE

# One rank of a small model, without engines' side.
WORDS = (
    "model=tiny_qwen3",
    "hardware=h100",
    "site=local",
    "set=hardware.gpus_per_node=1 engine.gpus_per_engine=1 engine.num_engines=1",
)
SECONDS_TO_END = 30


@pytest.mark.faults("rehearsal")
def test_killed_while_it_saves_it_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    home = Path(os.environ.get(VARIABLE) or ROOT / ".envs" / "rehearsal")
    require("rehearsal", "" if (home / ".ready").exists() else "`make env-rehearsal` was not run")
    scratch, plans = tmp_path / "scratch", tmp_path / "results" / "plans"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), VARIABLE: str(home)}
    name = _name_of_record(tmp_path, environment)
    write_json(plans / f"{name}.rehearsal.json", {"told": "by an earlier one"})
    write_text(plans / f"{name}.rehearsal.html", "an earlier page")
    before = _content(plans)
    command = [sys.executable, "-m", "posttrain", "rehearse", *WORDS]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        try:
            family = _wait_for_save(running)
            assert len(family) >= 3, "the one that forks ranks, a rank, and who removes what is temporary"
            assert [*scratch.iterdir()]
        finally:
            running.kill()
    _, alive = psutil.wait_procs(family, timeout=SECONDS_TO_END)
    assert not alive
    assert [*scratch.rglob("*")] == []
    assert _content(plans) == before
    assert read_json(plans / f"{name}.rehearsal.json") == {"told": "by an earlier one"}


def _name_of_record(folder: Path, environment: dict[str, str]) -> str:
    """Return the name that plan and rehearsal of the words share."""
    command = [sys.executable, "-m", "posttrain", "plan", *WORDS]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    (plan,) = (folder / "results" / "plans").glob("*.html")
    return plan.stem


def _wait_for_save(running: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all that a rehearsal has started, as soon as its first rank begins to save."""
    assert running.stderr
    for line in running.stderr:
        if line.startswith("rank 0: step 2") and "save" in line:
            return psutil.Process(running.pid).children(recursive=True)
    raise AssertionError("it ended before it saved")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

"""The command on this machine: what it shows, what it leaves, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.forked_programs import run_posttrain
from tests.support.resolved_words import resolved_words


def preflight(folder: Path, **choice: object) -> subprocess.CompletedProcess[str]:
    roots = f"site.results={folder}/results site.node_local={folder}/local"
    workflow = {"model": "tiny", "site": "local", "run": "mine", "set": roots, **choice}
    return run_posttrain("preflight", *resolved_words(workflow, folder))


def test_a_machine_that_is_fit(tmp_path: Path) -> None:
    done = preflight(tmp_path)
    assert done.returncode == 0, done.stderr
    line, where = done.stdout.splitlines()
    assert line.startswith("ok       node0: node-local disk ")
    assert where == f"preflight: {tmp_path}/results/mine/preflight.json"
    written = json.loads((tmp_path / "results/mine/preflight.json").read_text())
    assert (written["fit"], written["unfit"]) == (["node0"], {})


def test_an_unfit_machine_is_told_with_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "local").touch()  # where the folder of copies should be
    done = preflight(tmp_path)
    assert done.returncode == 1
    assert "1 of 1 nodes are unfit to train:\n  node0: node-local disk (site.node_local): " in done.stderr
    assert "\n  remedy: repair them\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "results/mine/preflight.json").read_text())["fit"] == []


def test_pods_are_not_looked_at_without_training(tmp_path: Path) -> None:
    done = preflight(tmp_path, site="example_kubernetes", set="")
    assert done.returncode == 1
    assert "site.launcher = kubernetes" in done.stderr

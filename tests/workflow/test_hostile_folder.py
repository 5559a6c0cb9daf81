"""A clone in a folder whose name means something to shells, formats and Snakemake."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.workflow_runs import FAST, ROOT, run_snakemake

pytestmark = pytest.mark.slow

HOSTILE = "p $(touch pwn) `touch pwn` {a} {input} %s * ; ü'q\" &"
SETTINGS = " ".join(f"{key}={value}" for key, value in FAST.items())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files under version control that the workflow is made of."""
    folder = tmp_path / HOSTILE
    parts = ("Snakefile", "config", "scripts", "workflow")
    listed = subprocess.run(["git", "ls-files", *parts], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def test_nothing_of_a_folders_name_is_executed_or_lost(clone: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = run_snakemake(
            clone, "--cores", "2", *words, "--config", f"set={SETTINGS}", snakefile=clone / "Snakefile"
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    assert "train" in run("-n")
    run("resolve_config", "download_dataset", "gc")
    (resolved,) = clone.glob("results/*/config.resolved.yaml")
    assert (resolved.parent / "experiment.yaml").exists()
    (dataset,) = clone.glob("resources/datasets/sort_digits-????????-v3")
    assert len((dataset / "heldout.jsonl").read_text().splitlines()) == FAST["data.num_heldout_prompts"]
    assert [path for path in tmp_path.rglob("*pwn*") if path.name != HOSTILE] == []
    assert [path.name for path in tmp_path.iterdir()] == [HOSTILE]

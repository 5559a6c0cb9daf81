import subprocess
import sys

import pytest
from tests.support.begun_runs import CONFIG_DIR, begin_run, workflow_of
from tests.support.resolved_words import resolved_words

from posttrain.artifacts import read_receipt

REPOSITORY = CONFIG_DIR.parent


def fork_checkpoint(results, **more):
    receipt = results / "new" / "fork.receipt.json"
    words = resolved_words(workflow_of(results, run="new", **more), results.parent / "configs")
    command = [sys.executable, REPOSITORY / "scripts/fork_checkpoint.py", *words, "--receipt", receipt]
    return subprocess.run(command, capture_output=True, text=True, check=False), receipt


def test_its_receipt_is_written_last_and_tells_the_parent(tmp_path):
    begin_run(tmp_path, "old")
    done, receipt = fork_checkpoint(tmp_path, fork="old@4")
    assert done.returncode == 0, done.stderr
    (ancestor,) = read_receipt(receipt).settings["lineage"]
    assert ancestor == {"run": "old", "step": 4, "changed": {}}
    assert (tmp_path / "new/train/checkpoints/step_000004/__1_0.distcp").samefile(
        tmp_path / "old/train/checkpoints/step_000004/__1_0.distcp"
    )


@pytest.mark.parametrize("more", [{}, {"fork": "old@3"}])
def test_what_cannot_be_forked_is_told_without_a_traceback(tmp_path, more):
    begin_run(tmp_path, "old")
    done, receipt = fork_checkpoint(tmp_path, **more)
    assert done.returncode == 1
    assert f"fork = {more.get('fork', 'not set')}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not receipt.exists()

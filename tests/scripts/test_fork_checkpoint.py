import itertools
import random
import shutil
import time

import pytest
from tests.support.begun_runs import begin_run, workflow_of
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import run_step
from tests.support.killing import run_killed
from tests.support.resolved_words import resolved_words

from posttrain.store import read_receipt


def fork_checkpoint(results, **more):
    receipt = results / "new" / "fork.receipt.json"
    words = resolved_words(workflow_of(results, run="new", **more), results.parent / "configs")
    return run_step("fork_checkpoint", [*words, "--receipt", receipt]), receipt


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


@pytest.mark.faults("kills")
def test_a_killed_fork_ends_as_an_undisturbed_one(tmp_path, faults: FaultRecord):
    """Kill it once at every change of a file, then at random changes, several times in a row."""
    begin_run(tmp_path, "old")
    words = resolved_words(workflow_of(tmp_path, run="new", fork="old@4"), tmp_path / "configs")
    new, started, rng = tmp_path / "new", time.monotonic(), random.Random(8)
    words += ["--receipt", new / "fork.receipt.json"]
    assert run_killed("fork_checkpoint", words, new, [10**9]) == [0]
    calm = forked_files(new)
    changes = itertools.count(1)
    kills, points = 0, [next(changes)]
    while kills < 60:
        shutil.rmtree(new)
        endings = run_killed("fork_checkpoint", words, new, [*points, 10**9])
        assert endings[-1] == 0
        assert forked_files(new) == calm
        kills += endings.count(-9)
        if endings[0] == 0 or len(points) > 1:  # every change has been tried alone
            points = [rng.randint(1, 30) for _ in range(4)]
        else:
            points = [next(changes)]
    faults.add_counts("kills", {"fork_checkpoint": kills}, time.monotonic() - started)
    faults.equal = True


def forked_files(folder) -> dict[str, bytes]:
    """Return what a fork has made: its receipt, checkpoint and metrics; leases are left out."""
    wanted = [folder / "fork.receipt.json", *(folder / "train").rglob("*")]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in wanted
        if path.is_file() and "lease" not in path.as_posix()
    }

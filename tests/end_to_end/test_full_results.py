"""The disk of the results becomes full, or loses its inodes, in the middle of a training.

What the user is told last is the cause with its remedy, whatever else could not be written because of it. The same
command then ends with the bits of a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.scripts.test_full_disks import full, without_inodes
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import assert_gone, assert_same_training, start
from tests.support.small_disk import small_disk
from tests.support.workflow_runs import FAST, WorkflowFolder

pytestmark = [pytest.mark.slow, pytest.mark.faults("training"), pytest.mark.timeout(3600)]

# Where training is, what then happens to the disk, and what the last message must say.
TROUBLES: list[tuple[str, Callable, str, str]] = [
    ("rollouts/step_000000/chunk_0000.json", full, "the disk is full", "free some space there"),
    ("rollouts/step_000001/chunk_0000.json", without_inodes, "its inodes are used up", "delete files there"),
    ("checkpoints/step_000002", full, "the disk is full", "free some space there"),
]


def test_results_that_cannot_be_written(
    tmp_path: Path, store: Path, undisturbed: WorkflowFolder, faults: FaultRecord
) -> None:
    started = time.monotonic()
    with small_disk(tmp_path, "size=64m,nr_inodes=2000") as disk:
        workflow = WorkflowFolder(tmp_path / "work", store, FAST | {"site.results": disk / "results"})
        workflow.folder.mkdir()
        (workflow.folder / "results").symlink_to(disk / "results")
        for point, trouble, told, remedy in TROUBLES:
            driver = start(workflow, "train")
            driver.wait_for_file(point)
            with trouble(disk, 0):
                code, output = driver.finish()
            assert code != 0
            assert_gone(workflow)
            assert "Traceback" not in output
            assert "Logging error" not in output
            *_, last = re.findall(r"^\S+ E posttrain\.cli: (train\.py: .*?remedy: [^\n]*)", output, re.M | re.S)
            first, *_, advice = last.splitlines()
            assert first.startswith(f"train.py: {disk}/results/"), last
            assert first.endswith(told), last
            assert advice.startswith(f"  remedy: {remedy}"), last
            # A log whose rows end with a torn one is as good as whole; a lease whose holder is gone is free.
            with contextlib.suppress(FileNotFoundError):
                (disk / "ballast").unlink()
        code, output = start(workflow, "train").finish()
        assert code == 0, output[-4000:]
        assert_same_training(workflow, undisturbed)
    faults.add_events(Counter(told for _, _, told, _ in TROUBLES), time.monotonic() - started)
    faults.equal = True

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cluster.ranks import Ending, RankProcess
from posttrain.report.rank_progress import exit_reason_path
from posttrain.rl.training.graceful_shutdown import SAVED_EXIT_CODE


def ended_rank(folder: Path, code: int) -> RankProcess:
    (folder / "log").write_text("it says why")
    process = subprocess.Popen([sys.executable, "-c", f"input(); import os; os._exit({code})"], stdin=-1)
    rank = RankProcess(3, process, folder / "log", folder / "progress")
    process.communicate(b"\n")
    return rank


@pytest.mark.parametrize("code", [0, SAVED_EXIT_CODE])
def test_a_rank_that_is_done_or_has_saved_did_not_fail(tmp_path: Path, code: int) -> None:
    assert ended_rank(tmp_path, code).ending() is None


def test_a_rank_that_failed_is_told_with_its_log(tmp_path: Path) -> None:
    ending = ended_rank(tmp_path, 1).ending()
    assert ending is not None
    assert (ending.what, ending.order) == ("trainer rank 3", Ending.FAILED)
    assert ending.reason == "trainer rank 3 ended with exit code 1; its log ends with:\nit says why"


def test_a_rank_that_refuses_its_samples_is_no_failure_that_another_attempt_could_mend(tmp_path: Path) -> None:
    exit_reason_path(tmp_path / "progress").write_text("this, and what to do")
    ending = ended_rank(tmp_path, 1).ending()
    assert ending is not None
    assert (ending.order, ending.reason) == (Ending.REFUSED, "this, and what to do")

"""A start is kind to the shared file system; benchmarks/opened_files.py prints the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.opened_files import ENVIRONMENT, GOAL, ONE_STEP, before_first_step, missing_strace, most_shared
from tests.support.requirements import require
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow


@pytest.mark.faults("slow")
def test_few_shared_files_are_opened_before_the_first_step(store: Path, tmp_path: Path) -> None:
    require("strace", missing_strace())
    counts = before_first_step(WorkflowFolder(tmp_path / "work", store, ONE_STEP))
    assert [program for program, _ in counts] == ["head", "node", "trainer rank", "trainer rank", "engine"]
    for program, opened in counts:
        assert opened["clone"], f"the {program} imports modules of ours"
        assert opened[ENVIRONMENT], f"the {program} imports modules of others"
    assert most_shared(counts) <= GOAL

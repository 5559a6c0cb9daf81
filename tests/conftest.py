from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fault_record import FaultRecord
from tests.workflow_runs import WorkflowFolder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the tiny model up to staging, made once: about half a minute."""
    root = tmp_path_factory.mktemp("shared")
    WorkflowFolder(root / "first", root / "store").run("stage_all_nodes")
    return root / "store"


@pytest.fixture(scope="session")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """A whole run that nobody interrupts: what others are compared with; all its rollouts are in `rollouts`."""
    from tests.interruptions import keep_rollouts, start  # imports torch, which most tests do without

    workflow = WorkflowFolder(tmp_path_factory.mktemp("undisturbed"), store)
    driver = start(workflow)
    keep_rollouts(driver, workflow.folder / "rollouts")
    code, output = driver.finish()
    assert code == 0, output[-6000:]
    return workflow


@pytest.fixture
def workflow(store: Path, tmp_path: Path) -> WorkflowFolder:
    """A fresh working directory over the shared store."""
    return WorkflowFolder(tmp_path / "work", store)


@pytest.fixture
def faults() -> Iterator[FaultRecord]:
    """What a test of `make test-faults` did; written when it ends."""
    faults = FaultRecord()
    yield faults
    faults.write()

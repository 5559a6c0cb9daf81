from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.canaries import CANARIES, command_lines
from tests.fault_record import FaultRecord
from tests.workflow_runs import WorkflowFolder

UNPICKLED = "unpickled.txt"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the tiny model up to staging, made once: about half a minute."""
    root = tmp_path_factory.mktemp("shared")
    WorkflowFolder(root / "first", root / "store").run("stage_all_nodes")
    return root / "store"


@pytest.fixture(scope="session")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """A whole run that nobody interrupts: what others are compared with; all its rollouts are in `rollouts`.

    It has secrets that it must keep, and its processes note what they unpickle.
    """
    from tests.interruptions import keep_rollouts, start  # imports torch, which most tests do without

    folder = tmp_path_factory.mktemp("undisturbed")
    notes = {"PYTHONPATH": str(Path(__file__).with_name("unpickled")), "UNPICKLED_LOG": str(folder / UNPICKLED)}
    workflow = WorkflowFolder(folder, store, environment=dict(CANARIES) | notes)
    with command_lines() as seen:
        driver = start(workflow)
        keep_rollouts(driver, folder / "rollouts")
        code, output = driver.finish()
    assert code == 0, output[-6000:]
    (folder / "printed.txt").write_text(output)
    (folder / "command-lines.txt").write_text("\n".join(sorted(seen)))
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

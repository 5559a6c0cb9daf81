from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests import fault_parts
from tests.canaries import CANARIES, command_lines
from tests.fault_record import FaultRecord
from tests.workflow_runs import WorkflowFolder

UNPICKLED = "unpickled.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="", choices=["", *fault_parts.PARTS], help="only this part of the fault counts")
    parser.addoption("--anew", action="store_true", help="fault counts that have passed on this code, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left_out = fault_parts.select(items, config.getoption("--part"), config.getoption("--anew"))
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed and fault_parts.part_of(item):
        fault_parts.note_passed(item.nodeid)
    return report


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
def count(request: pytest.FixtureRequest) -> Iterator[fault_parts.Count]:
    """A count that goes on where it was interrupted."""
    kept = fault_parts.Count(request.node.name)
    yield kept
    if fault_parts.has_passed(request.node.nodeid):
        kept.forget()


@pytest.fixture
def faults() -> Iterator[FaultRecord]:
    """What a test of `make test-faults` did; written when it ends."""
    faults = FaultRecord()
    yield faults
    faults.write()

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from tests.support import fault_parts
from tests.support.canaries import CANARIES, command_lines
from tests.support.fault_record import FaultRecord
from tests.support.workflow_runs import ROOT, WorkflowFolder
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from posttrain.plan.resolve import resolve
from posttrain.store import receipt_of

UNPICKLED = "unpickled.txt"
# What takes longest begins first, so that two workers end together. While one makes the store and the undisturbed run,
# which most chains need (test_chain.py), the other has chains without them.
CHAINS = ("test_chain.py", "test_sglang.py", "test_tutorial.py", "")
ORDER = ("tests/slurm", *(f"tests/end_to_end/{name}" for name in CHAINS))
ORDER += ("tests/workflow", "tests/scripts", "tests/unit", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="", choices=["", *fault_parts.PARTS], help="only this part of the fault counts")
    parser.addoption("--anew", action="store_true", help="fault counts that have passed on this code, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], left_out = fault_parts.select(items, config.getoption("--part"), config.getoption("--anew"))
    config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: next(place for place, start in enumerate(ORDER) if item.nodeid.startswith(start)))


class ByFile(LoadFileScheduling):
    """One worker runs the tests of a file one after the other, and all that share the SLURM."""

    def _split_scope(self, nodeid: str) -> str:
        return "slurm" if nodeid.startswith("tests/slurm") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def root_of(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers share."""
    root = factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first worker who needs it makes; the other waits."""
    root = root_of(factory)
    folder, made = root / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed and fault_parts.part_of(item):
        fault_parts.note_passed(item.nodeid)
    return report


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the tiny model up to staging, made once: about half a minute."""

    def make(root: Path) -> None:
        first = WorkflowFolder(root / "first", root / "store")
        # Two that train from it may begin with what this makes; nobody else may change the store. A busy machine takes
        # twenty times as long.
        first.run("stage_all_nodes", str(receipt_of(first.paths.rollout_start)), timeout=1800)

    return made_once(tmp_path_factory, "shared", make) / "store"


@pytest.fixture(scope="session")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """A whole run that nobody interrupts: what others are compared with; all its rollouts are in `rollouts`.

    It has secrets that it must keep, and its processes note what they unpickle.
    """

    def workflow_in(folder: Path) -> WorkflowFolder:
        paths = [str(Path(__file__).with_name("unpickled")), *filter(None, [os.environ.get("PYTHONPATH")])]
        notes = {"PYTHONPATH": os.pathsep.join(paths), "UNPICKLED_LOG": str(folder / UNPICKLED)}
        return WorkflowFolder(folder, store, environment=dict(CANARIES) | notes)

    def make(folder: Path) -> None:
        from tests.support.interruptions import keep_rollouts, start  # imports torch, which most tests do without

        with command_lines() as seen:
            driver = start(workflow_in(folder))
            keep_rollouts(driver, folder / "rollouts")
            code, output = driver.finish()
        assert code == 0, output[-6000:]
        (folder / "printed.txt").write_text(output)
        (folder / "command-lines.txt").write_text("\n".join(sorted(seen)))

    return workflow_in(made_once(tmp_path_factory, "undisturbed", make))


@pytest.fixture
def undisturbed_alone(
    undisturbed: WorkflowFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkflowFolder]:
    """The same while nobody else runs in it or copies it, for a test that leaves it as it was."""
    with FileLock(root_of(tmp_path_factory) / "undisturbed.alone.lock"):
        yield undisturbed


@pytest.fixture
def finished(undisturbed_alone: WorkflowFolder, tmp_path: Path) -> WorkflowFolder:
    """A finished run with a store of its own, to be damaged."""
    folder = tmp_path / "work"
    shutil.copytree(undisturbed_alone.folder, folder, symlinks=True)
    shutil.copytree(undisturbed_alone.store, tmp_path / "store", symlinks=True)
    return WorkflowFolder(folder, tmp_path / "store")


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


@pytest.fixture(scope="session")
def resolved():
    """Return resolve(model, **more of the workflow's configuration)."""

    return resolve_model


@cache
def resolve_model(model, **more):
    return resolve({"model": model, "site": "local", **more}, ROOT / "config")

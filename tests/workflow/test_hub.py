"""The chain from a private Hub repository, with secrets in the environment, metrics to W&B, and a store of its own.

`make test` runs what uses the secrets, the fetching and training; `make test-faults PART=slow` goes on to the report.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.branches import jobs_of
from tests.support.hub_server import HubServer
from tests.support.interruptions import assert_same_training
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.store import receipt_of

pytestmark = pytest.mark.slow

HF_CANARY = "hf_canaryA0b1C2d3E4f5"
WANDB_CANARY = "canary" + "0123456789abcdef" * 2 + "00"
CANARIES = [HF_CANARY.encode(), WANDB_CANARY.encode()]


@dataclass
class ProcessWatch:
    """Reads the command lines of all processes of the machine, over and over, while it is open."""

    seen: set[bytes] = field(default_factory=set)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                # A process may end before it is read.
                with contextlib.suppress(OSError):
                    self.seen.add(path.read_bytes())


@dataclass
class HubRun:
    """A finished run from a Hub repository."""

    workflow: WorkflowFolder
    output: str
    command_lines: set[bytes]
    hub: HubServer


@pytest.fixture(scope="module")
def from_hub(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubRun]:
    folder = tmp_path_factory.mktemp("from_hub")
    (made,) = (path for path in (store / "made").iterdir() if receipt_of(path).exists())
    with HubServer() as hub:
        settings = {
            **FAST,
            "model.source.kind": "hub",
            "model.source.repo_id": "owner/small",
            "model.source.revision": hub.add_repo("owner/small", made, token=HF_CANARY),
            "logging.wandb": "true",
            "download.num_parts": 2,
        }
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": HF_CANARY,
            "WANDB_API_KEY": WANDB_CANARY,
            "HOME": str(folder / "home"),
        }
        (folder / "home").mkdir()
        workflow = WorkflowFolder(folder / "work", folder / "store", settings, environment)
        watch = ProcessWatch()
        with watch.open():
            output = workflow.run("train")
        yield HubRun(workflow, output, watch.seen, hub)


@pytest.fixture(scope="module")
def reported(from_hub: HubRun) -> HubRun:
    """The same run with its report."""
    watch = ProcessWatch()
    with watch.open():
        output = from_hub.workflow.run()
    return HubRun(from_hub.workflow, output, watch.seen, from_hub.hub)


def written(run: HubRun) -> list[Path]:
    """Return all files of a run, its store and its home, after a look that none has a secret."""
    files = [path for path in run.workflow.folder.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if any(canary in path.read_bytes() for canary in CANARIES)]
    assert not any(canary.decode() in run.output for canary in CANARIES)
    return files


# A whole store is made, and a trainer and an engine start.
def test_no_secret_is_written_by_what_uses_it(from_hub: HubRun) -> None:
    kinds = {path.suffix for path in written(from_hub)}
    assert {".wandb", ".log", ".json", ".jsonl", ".safetensors", ".tsv"} <= kinds


@pytest.mark.faults("slow")
def test_no_secret_is_written_anywhere(reported: HubRun) -> None:
    files = written(reported)
    kinds = {path.suffix for path in files}
    assert {".wandb", ".log", ".json", ".jsonl", ".html", ".safetensors", ".tsv"} <= kinds
    assert any(path.name.endswith(".receipt.json") for path in files)


def test_no_secret_is_on_a_command_line(from_hub: HubRun) -> None:
    check_command_lines(from_hub, "download_hf_checkpoint.py", "train.py", "posttrain.rl.engines.embedded")


@pytest.mark.faults("slow")
def test_no_secret_is_on_a_command_line_up_to_the_report(reported: HubRun) -> None:
    check_command_lines(reported, "evaluate.py", "render_report.py", "posttrain.rl.engines.embedded")


def check_command_lines(run: HubRun, *scripts: str) -> None:
    assert all(any(name.encode() in line for line in run.command_lines) for name in scripts), "it saw every step"
    assert not [line for line in run.command_lines if any(canary in line for canary in CANARIES)]


def test_the_source_makes_no_difference(from_hub: HubRun, undisturbed_alone: WorkflowFolder) -> None:
    """The experiments differ in the model's source only, and its bytes are the same."""
    assert from_hub.workflow.run_folder.name != undisturbed_alone.run_folder.name
    assert_same_training(from_hub.workflow, undisturbed_alone)


def test_every_file_is_fetched_once_at_the_pinned_commit(from_hub: HubRun) -> None:
    revision = from_hub.hub.revision("owner/small")
    (receipt,) = from_hub.workflow.store.glob("tiny/*/hf.receipt.json")
    assert receipt.parent.name == revision[:12]
    content = json.loads(receipt.read_text())
    assert {name: content["settings"][name] for name in ("repo_id", "revision")} == {
        "repo_id": "owner/small",
        "revision": revision,
    }
    assert len(list(receipt.parent.glob("hf.parts/*.receipt.json"))) == 2
    assert all(from_hub.hub.fetched[record["path"]] == 1 for record in content["files"])
    assert all(len(r["sha256"]) == 64 for r in content["files"] if r["path"].endswith(".safetensors"))


def test_nothing_is_left_to_do(from_hub: HubRun) -> None:
    assert "Nothing to be done" in from_hub.workflow.dry_run("train")


def test_another_split_makes_nothing_again(from_hub: HubRun) -> None:
    workflow = from_hub.workflow
    settings = workflow.settings | {"convert.num_parts": 3, "download.num_parts": 3, "download.num_workers": 1}
    changed = WorkflowFolder(workflow.folder, workflow.store, settings, workflow.environment)
    assert jobs_of(changed.dry_run("train", "resolve_config")) == {"resolve_config"}

"""Bad input on real runs: one clear message as early as it can be known, and nothing that was there before is lost."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hub_server import HubServer
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.store import part_receipt_of, receipt_of

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"
MATRIX = "model.layers.1.self_attn.o_proj.weight"


@dataclass
class LimitedFolder(WorkflowFolder):
    """Runs in which no file may grow beyond a size: writes then fail as on a full disk."""

    max_file_bytes: int = 0

    def command(self, *targets: str, **arguments) -> list[str]:
        """Return the command line of a run under the limit."""
        code = (
            "import os, resource, sys; "
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({self.max_file_bytes},) * 2); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        return [sys.executable, "-c", code, *super().command(*targets, **arguments)]


@dataclass
class Refusal:
    """How a run ended that had to be refused.

    Args:
        output: What it printed.
        store: Path -> hash of every file of the store before the run.
    """

    workflow: WorkflowFolder
    output: str
    store: dict[Path, str] = field(repr=False)

    def check_start(self, *texts: str) -> None:
        """What the driver said before the first job."""
        assert "Traceback" not in self.output, self.output
        for text in texts:
            assert text in self.output, self.output
        assert not list(self.workflow.folder.glob("logs/*/*.log")), "a job has run"

    def check(self, rule: str, *texts: str) -> None:
        """The rule that failed, what the message says, and that the store holds all it held."""
        assert "Traceback" not in self.output, self.output
        failed = re.findall(r"^Error in rule (\w+):|^RuleException in rule (\w+)", self.output, re.MULTILINE)
        assert {name for names in failed for name in names if name} == {rule}, self.output
        message = self.message()
        for text in texts:
            assert text in message, message
        after = hashes_of(self.workflow.store)
        assert {path: after.get(path) for path in self.store} == self.store, "something is lost"

    def message(self) -> str:
        """What the failed step said: from its error line to what Snakemake says about it."""
        found = re.search(r"^\S+ E [\w.]+: (\w+\.py: .*?)^(?:\[\w{3} \w{3}|RuleException)", self.output, re.M | re.S)
        assert found, self.output
        return found[1]


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """A copy of the store, for tests that spoil it."""
    return Path(shutil.copytree(store, tmp_path / "store"))


@pytest.fixture
def model(store: Path, tmp_path: Path) -> Path:
    """A copy of the made model, for tests that spoil it."""
    (made,) = (path for path in (store / "made").iterdir() if receipt_of(path).exists())
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def refuse(
    workflow: WorkflowFolder, *targets: str, settings: dict[str, object] | None = None, **environment: str
) -> Refusal:
    """Run what must fail."""
    workflow.settings |= settings or {}
    workflow.environment |= environment
    before = hashes_of(workflow.store)
    code, output = workflow.attempt(*targets)
    assert code == 1, output
    return Refusal(workflow, output, before)


def hashes_of(folder: Path) -> dict[Path, str]:
    """Return the hash of every file below a folder."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a shard."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard_of(model: Path, name: str = MATRIX) -> Path:
    """Return the file that holds a tensor."""
    return model / json.loads((model / INDEX).read_text())["weight_map"][name]


# ---- the source of the model ----


def remove_a_shard(model: Path) -> Sequence[str]:
    shard_of(model).unlink()
    return [shard_of(model).name, "no such file"]


def truncate_a_shard(model: Path) -> Sequence[str]:
    shard = shard_of(model)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1000])
    return [shard.name, str(len(content)), str(len(content) - 1000)]


def name_an_absent_file(model: Path) -> Sequence[str]:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"][MATRIX] = "model-00009-of-00009.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    return ["model-00009-of-00009.safetensors"]


def change_a_shape(model: Path) -> Sequence[str]:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX] = tensors[MATRIX][:32].clone()

    rewrite(shard_of(model), halve)
    return [MATRIX, "[32, 64]", "[64, 64]"]


def put_a_nan(model: Path) -> Sequence[str]:
    rewrite(shard_of(model), lambda tensors: tensors[MATRIX][3, 5:7].fill_(float("nan")))
    return [MATRIX, "2 of 4096 values are NaN or infinite", shard_of(model).name, "get the file anew"]


def quantise(model: Path) -> Sequence[str]:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config))
    return ["quantization_config", "fp8"]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (remove_a_shard, "list_hf_checkpoint"),
        (truncate_a_shard, "list_hf_checkpoint"),
        (name_an_absent_file, "list_hf_checkpoint"),
        (change_a_shape, "patch_hf_config"),
        (quantise, "patch_hf_config"),
        (put_a_nan, "convert_hf_to_torch_dist"),
    ],
)
def test_a_bad_source(workflow: WorkflowFolder, model: Path, spoil: Callable[[Path], Sequence[str]], rule: str) -> None:
    texts = spoil(model)
    settings = {"model.source.kind": "folder", "model.source.folder": model, "rollout.fp8": "false"}
    before = hashes_of(model)
    workflow.store = workflow.folder.parent / "store"
    refusal = refuse(workflow, "stage_all_nodes", settings=settings)
    refusal.check(rule, *texts)
    assert hashes_of(model) == before
    assert not list(workflow.store.glob("tiny/*/torch_dist-*.receipt.json"))


@pytest.mark.parametrize(
    ("status", "texts"),
    [
        (0, ["model.source.revision = " + "f" * 40, "a commit"]),
        (403, ["model.source.repo_id = owner/small", "HF_TOKEN"]),
    ],
)
def test_a_hub_that_refuses(
    workflow: WorkflowFolder, hub: HubServer, model: Path, status: int, texts: Sequence[str]
) -> None:
    hub.add_repo("owner/small", model)
    hub.faults.status = status
    settings = {
        "model.source.kind": "hub",
        "model.source.repo_id": "owner/small",
        "model.source.revision": "f" * 40,
    }
    refuse(workflow, "stage_all_nodes", settings=settings, HF_ENDPOINT=hub.url).check("list_hf_checkpoint", *texts)


def test_bad_lines_of_a_dataset(workflow: WorkflowFolder, tmp_path: Path) -> None:
    rows = ['{"prompt": "12", "label": "3"}', "{not json", '{"prompt": "13"}', '{"prompt": 4, "label": "3"}', "[]"]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "14", "label": "3"}\n')
    settings = {
        "data.kind": "jsonl",
        "data.train_file": tmp_path / "train.jsonl",
        "data.heldout_file": tmp_path / "heldout.jsonl",
    }
    expected = ["4 of 5 lines", "line 2: not JSON", "line 3: 'label' is missing", "line 4: 'prompt'", "line 5: a list"]
    refusal = refuse(workflow, "train", settings=settings)
    refusal.check("download_dataset", *expected)


# ---- the store ----


def test_a_truncated_shard_in_the_store(workflow: WorkflowFolder, own_store: Path) -> None:
    workflow.store = own_store
    (folder,) = (path for path in own_store.glob("tiny/*/rollout_fp8-*") if path.name[-9] == "-")
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    receipt, parts = receipt_of(folder), part_receipt_of(folder, "*")
    refusal = refuse(workflow, "stage_all_nodes")
    refusal.check(
        "stage_to_node_local", shard.name, str(len(content)), str(len(content) - 10), f"rm {receipt} {parts} and run"
    )
    for path in [receipt, *parts.parent.glob(parts.name)]:
        path.unlink()
    workflow.run("stage_all_nodes")
    assert shard.read_bytes() == content, "the remedy works"


def test_a_corrupt_receipt(workflow: WorkflowFolder, own_store: Path) -> None:
    workflow.store = own_store
    (receipt,) = own_store.glob("tiny/*/torch_dist-*.receipt.json")
    content = receipt.read_text()
    receipt.write_text(content.replace('"size_bytes": ', '"size_bytes": 1', 1))
    refusal = refuse(workflow, "stage_all_nodes")
    refusal.check("stage_to_node_local", str(receipt), "changed by hand", "delete it and run again")
    receipt.unlink()
    workflow.run("stage_all_nodes")
    assert receipt.read_text() == content, "the remedy works"


# ---- the machine ----


# A model is fetched, and converted twice.
def test_a_full_disk(store: Path, tmp_path: Path) -> None:
    limit = 100_000
    workflow = LimitedFolder(tmp_path / "work", tmp_path / "store", dict(FAST), max_file_bytes=limit)
    (made,) = (path for path in (store / "made").iterdir() if receipt_of(path).exists())
    workflow.settings |= {"model.source.kind": "folder", "model.source.folder": made, "rollout.fp8": "false"}
    refusal = refuse(workflow, "stage_all_nodes")
    refusal.check("convert_hf_to_torch_dist", "larger than files may be", "ulimit -f", "what is finished is kept")
    kept = hashes_of(workflow.store)
    workflow.max_file_bytes = 1 << 30
    workflow.run("stage_all_nodes")
    after = hashes_of(workflow.store)
    assert kept.items() <= after.items()


def test_a_port_in_use(workflow: WorkflowFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refusal = refuse(workflow, "train", settings={"engine.port": port})
        refusal.check("train", f"engine.port = {port}: Address already in use", "set='engine.port=0'")
    assert not list(workflow.run_folder.glob("train/checkpoints/step_*"))


def test_wandb_online_without_a_key(workflow: WorkflowFolder) -> None:
    settings = {"logging.wandb": "true", "logging.wandb_mode": "online"}
    refusal = refuse(workflow, settings=settings, WANDB_API_KEY="")
    refusal.check_start("logging.wandb_mode = online without a key", "wandb_mode=offline")

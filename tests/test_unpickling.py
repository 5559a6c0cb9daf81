"""No byte that somebody else may have written is executed: every place that unpickles, and a payload at each door.

`test_every_place_that_unpickles_is_known` finds the calls in our code, `tests/end_to_end/test_unpickling.py` what a
whole run unpickles in anybody's. Training's doors have their payloads in
`tests/unit/rl/megatron_backend/test_checkpoint.py`.
"""

from __future__ import annotations

import ast
import base64
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.payload import Payload
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.export import open_trained
from posttrain.checkpoint.formats.adopted_torch_dist import check_adoptable
from posttrain.checkpoint.formats.hf_layout import check_source, read_object
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, read_header
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.hub.listed_files import read_manifest
from posttrain.checkpoint.quantization.calibration import Calibration
from posttrain.checkpoint.staging.node_slices import torch_dist_files
from posttrain.checkpoint.staging.staging_record import read_staging_record
from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.errors import CheckpointError, ConfigError
from posttrain.report.sinks import read_rows
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.engines.tensor_payload import PayloadError, deserialize_bucket
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.training.checkpoints import check_sizes
from posttrain.store import Receipt, read_receipt

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "workflow/src"
# What may run code that it reads. Not: json, what reads YAML (OmegaConf's loader is PyYAML's safe one), and kernels.
UNPICKLERS = ("load", "loads", "Unpickler", "from_pretrained", "load_state_dict", "recv")
HARMLESS = ("json.load", "json.loads", "OmegaConf.load", "dist.recv", "tl.load")
# Call -> what holds it safe.
PLACES = {
    ("config/command_line.py", "yaml.load"): "BaseLoader makes texts, lists and mappings only",
    ("config/strict_yaml.py", "load"): "yaml.safe_load, or OmegaConf's loader, which makes no objects either",
    ("rl/evaluation/export_check.py", "load"): "of rl/evaluation/layerwise.py",
    (
        "rl/evaluation/layerwise.py",
        "_model_class(config).from_pretrained",
    ): "trust_remote_code is off; we export safetensors",
    ("checkpoint/formats/torch_dist_format.py", "FormatUnpickler(file).load"): "the list of the format's classes",
    ("checkpoint/formats/torch_dist_format.py", "torch.load"): "weights_only",
    ("posttrain_rehearsal/disk.py", "FormatUnpickler(file).load"): "the list of the format's classes",
    ("checkpoint/formats/torch_dist_reader.py", "torch.load"): "weights_only",
    ("rl/megatron_backend/checkpoint.py", "strategy.load"): "SafeLoad",
    (
        "rl/megatron_backend/checkpoint.py",
        "load_state_dict",
    ): "SafeLoad: tensors only, read with weights_only",
    (
        "rl/megatron_backend/checkpoint.py",
        "torch.nn.ModuleList(chunks).load_state_dict",
    ): "takes tensors, reads nothing",
    ("rl/megatron_backend/optimizer_state.py", "part.load_state_dict"): "takes tensors, reads nothing",
    ("rl/engines/tensor_payload.py", "torch.load"): "weights_only",
    ("rl/engines/tensor_payload.py", "_TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load"): (
        "a list of two functions and of types"
    ),
    ("rl/engines/embedded/model.py", "model_class.config_class.from_pretrained"): "JSON",
    ("rl/data/chat.py", "AutoTokenizer.from_pretrained"): "trust_remote_code is off",
    ("cluster/handshake.py", "connection.recv"): "bytes of a socket",
    ("posttrain_weights/channel.py", "self._group.recv"): "bytes into a tensor",
    ("posttrain_weights/channel.py", "group.recv"): "the same",
    ("rl/reward/worker.py", "pickle.loads"): "what the parent packed for this child",
    ("rl/reward/worker.py", "channel.recv"): "bytes of a socket",
    ("rl/reward/graders.py", "self._channel.recv"): "bytes of a socket, read as JSON",
}


def name_of(path: Path) -> str:
    """Return how a file is called in PLACES."""
    folder = LIBRARY if path.is_relative_to(LIBRARY) else ROOT
    return path.relative_to(folder).as_posix().removeprefix("posttrain/")


def calls_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_every_place_that_unpickles_is_known():
    found = {
        (name_of(path), call)
        for path in (*LIBRARY.rglob("*.py"), *ROOT.glob("scripts/*.py"))
        for call in calls_in(path)
        if call.rpartition(".")[2] in UNPICKLERS and call not in HARMLESS
    }
    # An annex may be missing.
    assert found == {
        (name, call) for name, call in PLACES if not name.startswith("posttrain_") or (LIBRARY / name).exists()
    }


def test_what_ranks_send_each_other_as_pickles():
    """Nothing of it comes from a file; who may speak to a rank is another question (docs/threat-model.md)."""
    found = {
        name_of(path)
        for path in LIBRARY.rglob("*.py")
        for call in calls_in(path)
        if call.endswith(("_object", "_object_list")) and call.startswith("dist.")
    }
    assert found <= {"rl/megatron_backend/weights.py", "rl/training/checkpoint_writer.py", "rl/training/run.py"}


@pytest.mark.parametrize("call", ["torch.load"])
def test_torch_is_always_told_to_read_weights_only(call):
    told = [
        (path.name, [ast.unparse(keyword) for keyword in node.keywords])
        for path in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == call
    ]
    assert len(told) == 3
    assert all("weights_only=True" in keywords for _, keywords in told), told


# ---- a payload at each door ----


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Payload]:
    payload = Payload(tmp_path / "ran")
    yield payload
    assert not payload.has_run


def test_the_payload_runs_where_nobody_looks(tmp_path):
    payload = Payload(tmp_path / "ran")
    pickle.loads(payload.content)
    assert payload.has_run


# Reader -> the file, below its folder, that holds the payload.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "receipt": ("a.receipt.json", lambda folder: read_receipt(folder / "a.receipt.json")),
    "the Hub's list": ("hf.manifest.json", lambda folder: read_manifest(folder / "hf.manifest.json")),
    "testimony": ("a.testimony.json", lambda folder: read_staging_record(folder / "a.testimony.json")),
    "rollout": ("step_000003/chunk_0001.json", lambda folder: RolloutStore(folder).read(3, 1)),
    "metrics": ("metrics.jsonl", lambda folder: read_rows(folder / "metrics.jsonl")),
    "dataset": ("train.jsonl", lambda folder: load_prompts(folder / "train.jsonl")),
    "config": ("config.json", lambda folder: read_object(folder / "config.json")),
    "tokenizer": ("tokenizer.json", check_source),
    "index": ("model.safetensors.index.json", CheckpointReader),
    "shard": ("model.safetensors", CheckpointReader),
    "header": ("model.safetensors", lambda folder: read_header(folder / "model.safetensors")),
    "magnitudes": ("pass.json", lambda folder: Calibration([folder / "pass.json"])),
    "magnitudes of a library": ("pass.safetensors", lambda folder: Calibration([folder / "pass.safetensors"])),
    "a converted checkpoint": (".metadata", TorchDistReader),
    "adoption": (".metadata", lambda folder: check_adoptable(folder, TINY)),
    "staging by slices": (".metadata", lambda folder: torch_dist_files(folder, Receipt("", (), {}, {}), None)),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_is_not_run(tmp_path, payload, name):
    file, read = READERS[name]
    path = tmp_path / "folder" / file
    path.parent.mkdir(parents=True)
    # A line of its own: logs of lines leave out what has no end.
    path.write_bytes(payload.content + b"\n")
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        read(tmp_path / "folder")
    assert str(path) in str(refused.value)


def test_a_manifest_of_a_training_checkpoint_is_not_run(tmp_path, payload):
    (tmp_path / "manifest.json").write_bytes(payload.content)
    (line,) = check_sizes(tmp_path)
    assert line.startswith(f"{tmp_path / 'manifest.json'}: cannot be read")


def test_a_trained_checkpoint_that_is_exported_is_not_run(tmp_path, payload):
    from tests.support.tiny_checkpoint import make_random_checkpoint

    make_random_checkpoint(tmp_path / "hf", TINY)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/.metadata").write_bytes(payload.content)
    with rejected("metadata-invalid", "trained/.metadata"):
        open_trained(tmp_path / "trained", tmp_path / "hf", TINY)


def test_weights_for_an_engine_are_not_run(payload):
    with pytest.raises(PayloadError, match=r"posix\.mkdir is not allowed in a weight update"):
        deserialize_bucket(base64.b64encode(payload.content).decode())


def test_a_storage_among_weights_for_an_engine_is_not_run(tmp_path, payload):
    """The one function on the list that loads a second pickle."""
    torch.save(payload, tmp_path / "storage")

    class Storage:
        def __reduce__(self):
            return torch.storage._load_from_bytes, ((tmp_path / "storage").read_bytes(),)

    with pytest.raises(PayloadError, match=r"not a payload of named tensors: .*GLOBAL posix\.mkdir"):
        deserialize_bucket(base64.b64encode(pickle.dumps([("w", Storage())])).decode())


# ---- a tokenizer ----


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    make_tokenizer(64).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_code_of_a_tokenizer_is_not_run(tokenizer, tmp_path):
    ran = tmp_path / "ran"
    (tokenizer / "tokenization_own.py").write_text(f"import os\nos.mkdir({str(ran)!r})\nclass Own: pass\n")
    edit_json(
        tokenizer / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]},
    )
    with rejected("tokenizer-invalid"):
        ChatTokenizer(tokenizer)
    assert not ran.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir('RAN') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(tokenizer, tmp_path, template):
    (tokenizer / "chat_template.jinja").write_text(template.replace("RAN", str(tmp_path / "ran")))
    with rejected("template-rejects-messages", "unsafe"):
        ChatTokenizer(tokenizer).render([{"role": "user", "content": "x"}])
    assert not (tmp_path / "ran").exists()


def test_leftovers_of_other_formats_are_not_looked_at(tokenizer, payload):
    """Weights that are pickles are not on the list of what is fetched, and nothing here opens them."""
    from posttrain.checkpoint.hub.client import is_needed

    names = ("pytorch_model.bin", "model.pt", "x.pkl", "training_args.bin", "optimizer.pth", "a.ckpt", "w.npy", "c.py")
    assert not [name for name in names if is_needed(name)]
    shutil.copytree(tokenizer, tokenizer.parent / "with")
    (tokenizer.parent / "with" / "pytorch_model.bin").write_bytes(payload.content)
    ChatTokenizer(tokenizer.parent / "with").render([{"role": "user", "content": "1"}])

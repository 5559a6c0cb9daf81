"""Everything that reads names of files from a file which somebody else may have written refuses those that lead out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.hub_server import HubServer
from tests.support.rejections import rejected
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save

from posttrain.checkpoint.export import checkpoint_of
from posttrain.checkpoint.formats.safetensors_io import read_index
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.hub.listed_files import ListedFile, read_manifest
from posttrain.checkpoint.hub.listing import HubSource, list_files
from posttrain.checkpoint.parts.parts import description_path
from posttrain.checkpoint.parts.steps import read_parts
from posttrain.checkpoint.staging.eviction import Eviction, find_copies, make_room
from posttrain.checkpoint.staging.node_local import StagedSource, stage
from posttrain.checkpoint.staging.staging_record import read_staging_record, staging_record_of
from posttrain.checkpoint.staging.swarm import Swarm
from posttrain.errors import CheckpointError
from posttrain.rl.training.checkpoints import check_sizes
from posttrain.store import FileRecord, Receipt, RelativeName, read_receipt, record_files, write_receipt

NAMES = ["../victim", "/victim", "a/../../victim", "a\x1b[2J", "a\\b", "a" * 300]
ROW = {"path": "", "size_bytes": 1, "xxh3_128": "0" * 32}


def receipt(folder: Path, name: str) -> None:
    """Plant a receipt whose digest fits: whoever writes the name computes that, too."""
    settings: dict = {"num": 3}
    files = [{**ROW, "path": name, "sha256": ""}]
    content = {"step": "patch_hf_config", "format_version": 1, "files": files, "inputs": {}, "settings": settings}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "planted").write_text(json.dumps({**content, "digest": digest}))
    read_receipt(folder / "planted")


def manifest(folder: Path, name: str) -> None:
    (folder / "planted").write_text(json.dumps({"source": {}, "files": [{"path": name, "size_bytes": 1}]}))
    read_manifest(folder / "planted")


def index(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    read_index(folder)


def torch_dist(folder: Path, name: str) -> None:
    torch_save({"w": torch.zeros(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data:
        metadata.storage_data[place] = dataclasses.replace(metadata.storage_data[place], relative_path=name)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    TorchDistReader(folder)


def file_of_a_staging_record(folder: Path, name: str) -> None:
    file = {**ROW, "path": name, "mtime_ns": 0, "is_ours": True}
    (folder / "planted").write_text(json.dumps({"boot_id": "", "used_unix": 0, "files": [file], "links": []}))
    read_staging_record(folder / "planted")


def link_of_a_staging_record(folder: Path, name: str) -> None:
    (folder / "planted").write_text(json.dumps({"boot_id": "", "used_unix": 0, "files": [], "links": [name]}))
    read_staging_record(folder / "planted")


def description(folder: Path, name: str) -> None:
    (folder / "x").mkdir()
    (folder / "x" / "a").write_text("a")
    path = folder / "x.parts" / "0.receipt.json"
    settings = {"part": 0, "num_parts": 1, "notes": ""}
    write_receipt(path, Receipt("convert_hf_to_torch_dist", (FileRecord("a", 1, "0" * 32),), {}, settings))
    content = {"record": {**ROW, "path": name}, "made_from": "", "notes": {}}
    description_path(folder / "x", "a").write_text(json.dumps(content))
    read_parts(folder / "x", [path], Receipt("convert_hf_to_torch_dist", (), {}, {}), ["a"])


def final_checkpoint(folder: Path, name: str) -> None:
    checkpoint_of(folder, Receipt("train_grpo", (), {}, {"final_checkpoint": name}))


READERS: list[Callable[[Path, str], None]] = [
    *(
        receipt,
        manifest,
        index,
        torch_dist,
        file_of_a_staging_record,
        link_of_a_staging_record,
        description,
        final_checkpoint,
    ),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_name_that_leads_out_is_refused(read: Callable[[Path, str], None], name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, name)
    message = str(refused.value)
    assert ascii(name[:120])[1:-1].replace("\\", "") in message.replace("\\", ""), "the name is shown"
    assert message.isprintable()
    assert "[name-leaves-folder]" in message


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_the_manifest_of_a_training_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps([{**ROW, "path": name, "sha256": ""}]))
    (line,) = check_sizes(tmp_path)
    assert line.startswith(f"{tmp_path}/manifest.json: cannot be read (")
    assert "[name-leaves-folder]" in line
    assert line.isprintable()


def test_only_what_is_needed_of_a_listing_is_looked_at(tmp_path: Path) -> None:
    for name in ("config.json", "a\nb.json", "a\nb.png"):
        (tmp_path / name).write_text("{}")
    with HubServer() as hub:
        source = HubSource("owner/name", hub.add_repo("owner/name", tmp_path), endpoint=hub.url)
        found = list_files(source, tmp_path.with_name("kept.json"), lambda name: name == "config.json")
        assert [file.path for file in found.files] == ["config.json"]
        with rejected("name-leaves-folder", r"'a\nb.json'"):
            list_files(source, tmp_path.with_name("kept.json"), lambda name: name.endswith(".json"))


@pytest.mark.parametrize(
    "digest", [{"sha256": "/../../../../tmp/" + "0" * 47}, {"git_blob": "x"}, {"xxh3_128": "../a"}]
)
def test_files_are_named_after_digests_only(digest: dict[str, str]) -> None:
    with rejected("digest-invalid"):
        ListedFile("a", 1, **digest)


def test_staging_writes_nothing_behind_a_link(tmp_path: Path) -> None:
    folder, node, victim = tmp_path / "x", tmp_path / "node", tmp_path / "victim"
    for made in (folder / "sub", node / "x", victim):
        made.mkdir(parents=True)
    (folder / "sub" / "file").write_text("weights")
    (node / "x" / "sub").symlink_to(victim)
    origin = StagedSource(folder, Receipt("finalize_torch_dist", record_files(folder), {}, {}))
    for known in (origin, dataclasses.replace(origin, local=frozenset())):
        with rejected("link-in-the-way", f"{node}/x/sub"):
            stage([known], node)
    assert list(victim.iterdir()) == []


def test_eviction_deletes_nothing_behind_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy, victim = tmp_path / "glm5" / "abc" / "x", tmp_path / "victim"
    for made in (copy, victim):
        made.mkdir(parents=True)
    (victim / "file").write_text("v")
    (copy / "sub").symlink_to(victim)
    file = {**ROW, "path": "sub/file", "mtime_ns": 0, "is_ours": True}
    planted = {"boot_id": "", "used_unix": 0.0, "files": [file], "links": []}
    staging_record_of(copy).write_text(json.dumps(planted))
    assert find_copies(tmp_path) == []
    make_room(1, tmp_path, Eviction("unused", 0.0, tmp_path))
    assert "[link-in-the-way]" in caplog.text
    assert (victim / "file").exists()


def test_a_torrent_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 17))
    with Swarm(tmp_path) as swarm:
        swarm.make_torrent("0" * 32, tmp_path / "file", tmp_path / "right.torrent")
        with rejected("torrent-of-other-files", f"{tmp_path}/right.torrent", "1" * 32):
            swarm.download("1" * 32, tmp_path / "right.torrent")
        swarm.seed("0" * 32, tmp_path / "file", tmp_path / "right.torrent")


def test_a_name_that_was_read_is_of_the_type(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    path = tmp_path / "x.receipt.json"
    write_receipt(path, Receipt("finalize_torch_dist", record_files(tmp_path, ["a"]), {}, {}))
    assert [type(record.path) for record in read_receipt(path).files] == [RelativeName]

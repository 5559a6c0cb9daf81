import hashlib
import json
import os
import socket
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.hub.listed_files import ListedFile, Manifest, write_manifest
from posttrain.checkpoint.hub.local_folder import list_folder, place_files
from posttrain.checkpoint.parts import fill_folder
from posttrain.errors import CheckpointError
from posttrain.store import Receipt, manifest_of, record_files

NAMES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def origin(tmp_path):
    folder = tmp_path / "origin"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "pytorch_model.bin").write_text("not needed")
    return folder


@pytest.fixture
def other_disk(tmp_path):
    """Return a folder that files of `tmp_path` cannot be hard-linked into."""
    parent = Path("/dev/shm")
    if not parent.is_dir() or parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    folder = parent / f"posttrain-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def place_folder(origin, folder, receipt=None):
    """List a folder and bring all of it, in one part."""
    return place_files(origin, folder, list_folder(origin, receipt).files, 2)


def test_needed_files_get_a_second_name_without_a_network(origin, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    records = place_folder(origin, tmp_path / "hf")
    assert sorted(os.listdir(tmp_path / "hf")) == NAMES
    assert all((tmp_path / "hf" / name).samefile(origin / name) for name in NAMES)
    assert records == record_files(origin, NAMES)


def test_files_behind_symlinks_are_taken_as_files(origin, tmp_path):
    blob = tmp_path / "blob"
    (origin / NAMES[1]).rename(blob)
    (origin / NAMES[1]).symlink_to("../blob")
    place_folder(origin, tmp_path / "hf")
    assert not (tmp_path / "hf" / NAMES[1]).is_symlink()
    assert (tmp_path / "hf" / NAMES[1]).samefile(blob)


def test_another_file_system_gets_copies(origin, other_disk):
    records = place_folder(origin, other_disk)
    assert records == record_files(origin, NAMES)
    assert not (other_disk / NAMES[1]).samefile(origin / NAMES[1])
    times = {name: (other_disk / name).stat().st_mtime_ns for name in NAMES}
    (other_disk / NAMES[0]).write_text(json.dumps({"name": "confiG.json"}))
    assert place_folder(origin, other_disk) == records
    assert {n: (other_disk / n).stat().st_mtime_ns for n in NAMES[1:]} == {n: times[n] for n in NAMES[1:]}


def test_space_is_needed_for_copies_only(origin, tmp_path, other_disk, monkeypatch):
    def no_space(folder, needed, what):
        assert needed == 0, what

    monkeypatch.setattr(fill_folder, "require_free_space", no_space)
    place_folder(origin, tmp_path / "hf")
    with pytest.raises(AssertionError, match="the rest of"):
        place_folder(origin, other_disk)


def test_files_are_compared_with_the_receipt_of_the_step_that_made_them(origin, tmp_path):
    receipt = Receipt("make_tiny_model", record_files(origin), {}, {})
    place_folder(origin, tmp_path / "right", receipt)
    manifest = list_folder(origin, receipt)
    assert manifest.source["receipt"] == receipt.digest
    for name in (NAMES[0], NAMES[2]):
        (origin / name).write_text((origin / name).read_text().swapcase())
    with pytest.raises(CheckpointError) as raised:
        place_files(origin, tmp_path / "wrong", manifest.files, 2)
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [str(origin / NAMES[0]), str(origin / NAMES[2])]
    assert "xxh3_128" in lines[1]
    assert os.listdir(tmp_path / "wrong") == [NAMES[1]]
    (origin / NAMES[2]).unlink()
    with rejected("origin-differs", origin / NAMES[2]):
        place_folder(origin, tmp_path / "wrong", receipt)


def test_a_download_elsewhere_is_held_against_the_hubs_list_beside_it(origin, tmp_path):
    content = (origin / NAMES[1]).read_bytes()
    listed = ListedFile(NAMES[1], len(content), sha256=hashlib.sha256(content).hexdigest())
    source = {"kind": "hub", "repo_id": "owner/name", "revision": "a" * 40, "repo_type": "model"}
    write_manifest(manifest_of(origin), Manifest(source, (listed,)))
    manifest = list_folder(origin)
    assert (manifest.source["kind"], manifest.source["repo_id"]) == ("folder", "owner/name")
    (record,) = place_files(origin, tmp_path / "hf", manifest.files, 1)
    assert record.sha256 == listed.sha256
    (origin / NAMES[1]).write_bytes(content.swapcase())
    with rejected("origin-differs", origin / NAMES[1], listed.sha256):
        place_files(origin, tmp_path / "hf", manifest.files, 1)
    os.truncate(origin / NAMES[1], 3)
    with rejected("origin-differs", f"{NAMES[1]}: 3 bytes, {len(content)} expected"):
        list_folder(origin)


def test_a_folder_that_does_not_exist_or_holds_nothing(tmp_path):
    with rejected("no-such-checkpoint", "nowhere", key="model.source.folder"):
        place_folder(tmp_path / "nowhere", tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "weights.bin").touch()
    with rejected("no-checkpoint-files"):
        place_folder(tmp_path / "empty", tmp_path / "hf")

import os
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.artifacts import FORMAT_VERSIONS, Receipt, hash_file, record_files
from posttrain.checkpoint import file_placement, node_local
from posttrain.checkpoint.node_local import (
    Origin,
    check_copy,
    read_boot_id,
    read_testimony,
    stage,
    write_testimony,
)
from posttrain.errors import CheckpointError

FILES = {
    "a.distcp": b"a" * 300_000,
    "b.distcp": b"b" * 200_000,
    "deep/common.pt": b"c" * 1000,
    ".metadata": b"d",
}
TOTAL = 501_001


@pytest.fixture
def origin(tmp_path):
    return _make(tmp_path / "store" / "torch_dist-1", FILES)


@pytest.fixture
def node(tmp_path):
    return tmp_path / "node0"


def _make(folder: Path, files: dict[str, bytes]) -> Origin:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert "finalize_torch_dist" in FORMAT_VERSIONS
    return Origin(folder, Receipt("finalize_torch_dist", record_files(folder), {}, {}))


def _written(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {p.relative_to(folder).as_posix(): (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths}


def test_everything_is_copied(origin, node):
    (copy,) = stage([origin], node)
    assert record_files(node / "torch_dist-1") == origin.receipt.files
    assert (copy.bytes_copied, copy.bytes_kept) == (TOTAL, 0)
    assert not (node / "torch_dist-1" / "a.distcp").samefile(origin.folder / "a.distcp")


def test_what_is_right_is_kept(origin, node):
    stage([origin], node)
    before = _written(node)
    (copy,) = stage([origin], node)
    assert (copy.bytes_copied, copy.bytes_kept) == (0, TOTAL)
    assert _written(node) == before


def test_only_wrong_missing_and_half_files_are_repaired(origin, node):
    stage([origin], node)
    folder, before = node / "torch_dist-1", _written(node)
    (folder / "a.distcp").write_bytes(b"a" * 299_999 + b"x")
    (folder / ".metadata").unlink()
    os.truncate(folder / "deep" / "common.pt", 500)
    (copy,) = stage([origin], node)
    assert (copy.bytes_copied, copy.bytes_kept) == (301_001, 200_000)
    assert record_files(folder) == origin.receipt.files
    assert _written(node)["torch_dist-1/b.distcp"] == before["torch_dist-1/b.distcp"]


def test_what_others_put_there_stays(origin, node):
    folder = node / "torch_dist-1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (node / "cache").mkdir()
    stage([origin], node)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (node / "cache").is_dir()


def test_several_origins_and_the_files_behind_symlinks(origin, tmp_path, node):
    weights = tmp_path / "store" / "hf_patched-1"
    weights.mkdir()
    (weights / "model.safetensors").symlink_to("../torch_dist-1/a.distcp")
    other = Origin(weights, Receipt("patch_hf_config", record_files(weights), {}, {}))
    copies = stage([origin, other], node)
    assert [Path(copy.folder).name for copy in copies] == ["torch_dist-1", "hf_patched-1"]
    assert [copy.bytes_copied for copy in copies] == [TOTAL, 300_000]
    assert not (node / "hf_patched-1" / "model.safetensors").is_symlink()


def test_a_source_that_lies_there_already_is_not_copied(origin, caplog):
    caplog.set_level("INFO")
    before = _written(origin.folder)
    (copy,) = stage([origin], origin.folder.parent)
    assert (copy.bytes_copied, copy.bytes_kept) == (0, TOTAL)
    assert _written(origin.folder) == before
    assert "lies on this node already; nothing is copied" in caplog.text


def test_a_source_that_differs_from_its_receipt_is_refused(origin, node):
    (origin.folder / "b.distcp").write_bytes(b"x" + b"b" * 199_999)
    with pytest.raises(CheckpointError, match=rf"{origin.folder}/b.distcp: content differs from its receipt"):
        stage([origin], node)
    assert not (node / "torch_dist-1" / "b.distcp").exists()


def test_a_disk_without_space_is_refused_before_the_first_byte(origin, node, monkeypatch):
    stage([origin], node)
    for name in ("a.distcp", "b.distcp"):
        (node / "torch_dist-1" / name).unlink()
    before, usage = _written(node), file_placement.shutil.disk_usage(node)
    monkeypatch.setattr(file_placement.shutil, "disk_usage", lambda folder: usage._replace(free=499_999))
    with pytest.raises(RuntimeError, match=r"not enough disk space(.|\n)*needed: 500000 bytes"):
        stage([origin], node)
    assert _written(node) == before


def test_half_copies_of_killed_attempts_are_removed(origin, node):
    half = node / "torch_dist-1" / f".a.distcp.{os.uname().nodename}.{2**22 + 7}.tmp"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    stage([origin], node)
    assert not half.exists()


def test_a_disk_that_gives_back_other_bytes_is_found_when_asked(origin, node, monkeypatch):
    """Stands for a broken disk: the first file changes between the write and the second reading."""

    def spoil(source, target, progress, check):
        copied = file_placement.copy_file(source, target, progress, check)
        if target.name == "b.distcp":
            target.write_bytes(b"x" * 200_000)
        return copied

    monkeypatch.setattr(node_local, "copy_file", spoil)
    with pytest.raises(CheckpointError, match=r"b.distcp: reads back other bytes"):
        stage([origin], node, reread=True)
    assert not (node / "torch_dist-1" / "b.distcp").exists()


# ---- the quick check ----


@pytest.fixture
def testimony(origin, node, tmp_path):
    path = tmp_path / "node0.json"
    write_testimony(path, "node0", node, stage([origin], node))
    return read_testimony(path)


@pytest.fixture
def read_files(monkeypatch):
    """The files whose content is read from now on."""
    read = []

    def hash_and_note(path):
        read.append(path.name)
        return hash_file(path)

    monkeypatch.setattr("posttrain.artifacts.receipts.hash_file", hash_and_note)
    return read


def test_the_testimony_says_what_the_disk_holds(origin, node, testimony):
    assert testimony["node"] == "node0"
    assert testimony["folder"] == str(node)
    assert testimony["boot_id"] == read_boot_id()
    assert (testimony["bytes_copied"], testimony["bytes_kept"]) == (TOTAL, 0)
    (copy,) = testimony["copies"]
    assert copy["receipt_digest"] == origin.receipt.digest
    status = (node / "torch_dist-1" / "a.distcp").stat()
    row = {"path": "a.distcp", "size_bytes": 300_000, "mtime_ns": status.st_mtime_ns}
    assert row in copy["files"]


def test_a_copy_that_agrees_with_its_testimony_is_not_read(origin, node, testimony, read_files):
    assert check_copy(node / "torch_dist-1", origin.receipt, testimony) == []
    assert read_files == []


def test_a_touched_copy_is_read_and_still_right(origin, node, testimony, read_files):
    os.utime(node / "torch_dist-1" / "a.distcp", ns=(1, 1))
    assert check_copy(node / "torch_dist-1", origin.receipt, testimony) == []
    assert sorted(read_files) == sorted(Path(name).name for name in FILES)


def test_a_changed_copy_is_found(origin, node, testimony):
    folder = node / "torch_dist-1"
    (folder / "a.distcp").write_bytes(b"x" * 300_000)
    os.truncate(folder / "b.distcp", 5)
    (folder / ".metadata").unlink()
    assert [line.split(":")[0] for line in check_copy(folder, origin.receipt, testimony)] == [
        str(folder / name) for name in (".metadata", "a.distcp", "b.distcp")
    ]


@pytest.mark.parametrize("doubt", ["boot", "receipt", "folder"])
def test_a_testimony_about_something_else_is_not_believed(origin, node, testimony, read_files, doubt):
    folder, receipt = node / "torch_dist-1", origin.receipt
    if doubt == "boot":
        testimony["boot_id"] = "another start"
    if doubt == "receipt":
        receipt = replace(receipt, settings={"other": 1})
    if doubt == "folder":
        testimony["copies"][0]["folder"] = "/elsewhere"
    assert check_copy(folder, receipt, testimony) == []
    assert len(read_files) == len(FILES)


@pytest.mark.parametrize(("content", "message"), [(None, "staging to this node has not finished"), ("[]", "not a")])
def test_a_testimony_that_is_none(tmp_path, content, message):
    if content:
        (tmp_path / "node0.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_testimony(tmp_path / "node0.json")

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.staging import file_placement, node_local, staging_record
from posttrain.checkpoint.staging.node_local import StagedSource, read_again, stage
from posttrain.checkpoint.staging.staging_record import CopiedFile, read_boot_id, read_staging_record
from posttrain.store import FORMAT_VERSIONS, Receipt, hash_file, record_files

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


def _make(folder: Path, files: dict[str, bytes]) -> StagedSource:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert "finalize_torch_dist" in FORMAT_VERSIONS
    return StagedSource(folder, Receipt("finalize_torch_dist", record_files(folder), {}, {}))


def _written(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(staging_record.SUFFIX)]
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
    other = StagedSource(weights, Receipt("patch_hf_config", record_files(weights), {}, {}))
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
    with rejected("source-changed", f"{origin.folder}/b.distcp"):
        stage([origin], node)
    assert not (node / "torch_dist-1" / "b.distcp").exists()


def test_a_disk_without_space_is_refused_before_the_first_byte(origin, node, monkeypatch):
    stage([origin], node)
    for name in ("a.distcp", "b.distcp"):
        (node / "torch_dist-1" / name).unlink()
    before, usage = _written(node), file_placement.shutil.disk_usage(node)
    monkeypatch.setattr(file_placement.shutil, "disk_usage", lambda folder: usage._replace(free=499_999))
    with pytest.raises(OSError, match="not enough disk space for the copy to") as refused:
        stage([origin], node)
    assert refused.value.__notes__ == ["needed: 500000 bytes (0.00 GiB)"]
    assert _written(node) == before


def test_half_copies_of_killed_attempts_are_removed(origin, node):
    half = node / "torch_dist-1" / f".a.distcp.{os.uname().nodename}.{2**22 + 7}.5.{'a' * 16}.tmp"
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
    with rejected("disk-corrupts", "b.distcp"):
        stage([origin], node, reread=True)
    assert not (node / "torch_dist-1" / "b.distcp").exists()


# ---- the quick check ----


@pytest.fixture
def read_files(monkeypatch):
    """The files whose content is read from now on."""
    read = []

    def hash_and_note(path):
        read.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(node_local, "hash_file", hash_and_note)
    return read


def test_the_staging_record_says_what_the_disk_holds(origin, node):
    stage([origin], node)
    row = read_staging_record(staging_record.staging_record_of(node / "torch_dist-1"))
    assert row["boot_id"] == read_boot_id()
    assert row["receipt_digest"] == origin.receipt.digest
    assert (row["bytes_copied"], row["bytes_kept"]) == (TOTAL, 0)
    status = (node / "torch_dist-1" / "a.distcp").stat()
    assert CopiedFile("a.distcp", 300_000, origin.receipt.files[1].xxh3_128, status.st_mtime_ns, True) in row["files"]


def test_a_copy_that_agrees_with_its_staging_record_is_not_read(origin, node, read_files):
    stage([origin], node)
    (copy,) = stage([origin], node)
    assert (copy.bytes_copied, read_files) == (0, [])


def test_only_what_was_touched_is_read(origin, node, read_files):
    stage([origin], node)
    os.utime(node / "torch_dist-1" / "a.distcp", ns=(1, 1))
    stage([origin], node)
    assert read_files == ["a.distcp"]


def test_nothing_is_believed_after_a_restart_of_the_machine(origin, node, read_files, monkeypatch):
    stage([origin], node)
    monkeypatch.setattr(staging_record, "read_boot_id", lambda: "another start")
    stage([origin], node)
    assert sorted(read_files) == sorted(Path(name).name for name in FILES)


def test_a_staging_record_about_other_bytes_is_not_believed(origin, node):
    """Another conversion under the same name: as long, but with another receipt."""
    stage([origin], node)
    other = _make(node.parent / "elsewhere" / "torch_dist-1", FILES | {"a.distcp": b"x" * 300_000})
    (copy,) = stage([other], node)
    assert copy.bytes_copied == 300_000
    assert record_files(node / "torch_dist-1") == other.receipt.files


@pytest.mark.parametrize(("content", "code"), [(None, "staging-unfinished"), ("[]", "staging-record-invalid")])
def test_a_staging_record_that_is_none(tmp_path, content, code):
    if content:
        (tmp_path / "node0.json").write_text(content)
    with rejected(code, "node0.json"):
        read_staging_record(tmp_path / "node0.json")


# ---- a bad byte that size and time do not show ----


def flip_a_bit(path: Path) -> None:
    """Change one bit; size and modification time stay."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_flipped_bit_is_repaired_where_the_staging_record_is_not_believed(origin, node):
    stage([origin], node)
    flip_a_bit(node / "torch_dist-1" / "b.distcp")
    assert [copy.bytes_copied for copy in stage([origin], node)] == [0]
    assert [copy.bytes_copied for copy in stage([origin], node, believe=False)] == [200_000]
    assert record_files(node / "torch_dist-1") == origin.receipt.files


def test_a_flipped_bit_in_the_shared_files_is_named(origin):
    assert read_again([origin]) == []
    flip_a_bit(origin.folder / "b.distcp")
    (line,) = read_again([origin])
    assert line.startswith(f"{origin.folder}/b.distcp: content differs")
    assert read_again([replace(origin, local=frozenset(FILES) - {"b.distcp"})]) == []


# ---- files that stay behind ----


def test_files_that_nobody_here_needs_are_links(origin, node):
    few = replace(origin, local=frozenset({"a.distcp", ".metadata"}))
    (copy,) = stage([few], node)
    folder = node / "torch_dist-1"
    assert (copy.bytes_copied, copy.bytes_kept) == (300_001, 0)
    assert sorted(copy.links) == ["b.distcp", "deep/common.pt"]
    assert record_files(folder) == origin.receipt.files
    assert (folder / "b.distcp").readlink() == origin.folder / "b.distcp"
    assert not (folder / "a.distcp").is_symlink()


def test_links_become_files_when_they_are_needed_and_files_stay(origin, node):
    folder = node / "torch_dist-1"
    stage([replace(origin, local=frozenset({"a.distcp"}))], node)
    (copy,) = stage([replace(origin, local=frozenset({"b.distcp"}))], node)
    assert copy.bytes_copied == 200_000
    assert not (folder / "b.distcp").is_symlink()
    assert not (folder / "a.distcp").is_symlink()
    assert (folder / ".metadata").is_symlink()
    assert record_files(folder) == origin.receipt.files


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make another user's folder")
@pytest.mark.parametrize("depth", range(3))
def test_no_copy_is_made_where_another_user_could_change_it(origin, tmp_path, depth):
    destination = tmp_path / "root" / "node0" / "glm5" / "abc"
    destination.mkdir(parents=True)
    foreign = [destination, *destination.parents][depth]
    os.chown(foreign, 54_321, -1)
    with rejected("folder-of-another-user", f"{foreign}: belongs to user 54321"):
        stage([origin], destination)
    assert list(destination.iterdir()) == []
    os.chown(foreign, 0, -1)
    os.chown(tmp_path / "root", 54_321, -1)
    stage([origin], destination)
    assert record_files(destination / "torch_dist-1") == origin.receipt.files, "whose the root is, the site decides"

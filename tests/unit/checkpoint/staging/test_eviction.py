import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.checkpoint.staging import eviction, file_placement
from posttrain.checkpoint.staging.eviction import Eviction, evict, find_copies, in_use, make_room
from posttrain.checkpoint.staging.node_local import StagedSource, stage
from posttrain.checkpoint.staging.staging_record import staging_record_of
from posttrain.store import Receipt, record_files

SIZE = 100_000


@pytest.fixture
def disk(tmp_path):
    """A node's disk with copies of three models, unused for 3, 2 and 1 days."""
    for days, name in ((3, "first"), (2, "second"), (1, "third")):
        stage([_origin(tmp_path, name)], tmp_path / "node0" / name / "revision")
        path = staging_record_of(tmp_path / "node0" / name / "revision" / "weights")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"used_unix": time.time() - days * 86400}))
    return tmp_path / "node0"


def _origin(root: Path, name: str) -> StagedSource:
    folder = root / "store" / name / "weights"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(os.urandom(SIZE))
    (folder / "deep" / "b.bin").write_bytes(os.urandom(SIZE))
    return StagedSource(folder, Receipt("finalize_torch_dist", record_files(folder), {}, {}))


def _left(disk: Path) -> set[str]:
    return {path.relative_to(disk).parts[0] for path in disk.rglob("*.bin")}


def _limit_space(monkeypatch, disk: Path, free: int) -> None:
    """Make the disk as full as if this much were free with all three copies on it."""
    usage = file_placement.shutil.disk_usage(disk)
    monkeypatch.setattr(
        eviction.shutil,
        "disk_usage",
        lambda folder: usage._replace(free=free + (3 - len(_left(disk))) * 2 * SIZE),
    )


@pytest.mark.parametrize(("needed", "left"), [(50, {"first", "second", "third"}), (100_000, {"second", "third"})])
def test_the_longest_unused_go_until_there_is_room(disk, monkeypatch, needed, left):
    _limit_space(monkeypatch, disk, 60)
    make_room(needed, disk, Eviction("oldest", 0, disk))
    assert _left(disk) == left
    assert {path.parts[len(disk.parts)] for path in disk.rglob("*.testimony.json")} == left


def test_what_was_unused_for_long_goes_in_any_case(disk, caplog):
    make_room(0, disk, Eviction("unused", 1.5, disk))
    assert _left(disk) == {"third"}
    assert "weights (200 kB, unused for 3.0 days)" in caplog.text


def test_by_default_nothing_goes_and_what_could_is_said(disk, monkeypatch, caplog):
    caplog.set_level("INFO")
    _limit_space(monkeypatch, disk, 60)
    make_room(100, disk, Eviction("never", 30, disk))
    assert _left(disk) == {"first", "second", "third"}
    assert caplog.text.count("stage.evict=never keeps") == 3


def test_a_copy_in_use_stays_until_its_user_ends(disk):
    """The user is another process, and is killed."""
    code = (
        "import sys, time; from pathlib import Path; from posttrain.checkpoint.staging.eviction import in_use\n"
        "with in_use([Path(sys.argv[1])]): print('holds', flush=True); time.sleep(60)"
    )
    first = find_copies(disk)[0]
    user = subprocess.Popen([sys.executable, "-c", code, first.folder], stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout.readline() == "holds\n"
        with in_use([first.folder]):
            pass
        assert not evict(first)
        assert "first" in _left(disk)
    finally:
        user.kill()
        user.wait()
    assert evict(first)
    assert "first" not in _left(disk)


def test_what_is_not_ours_stays(disk):
    folder = disk / "first" / "revision" / "weights"
    (folder / "notes.txt").write_text("mine")
    (folder / "a.bin").write_bytes(b"changed by hand")
    (disk / "by_hand" / "revision" / "weights").mkdir(parents=True)
    (disk / "by_hand" / "revision" / "weights" / "c.bin").write_text("mine")
    make_room(0, disk, Eviction("unused", 1e-9, disk))
    assert sorted(path.name for path in disk.rglob("*") if path.is_file()) == ["a.bin", "c.bin", "notes.txt"]


def test_files_that_were_there_before_us_stay(tmp_path):
    origin, destination = _origin(tmp_path, "given"), tmp_path / "node0" / "given" / "revision"
    (destination / "weights").mkdir(parents=True)
    (destination / "weights" / "a.bin").write_bytes((origin.folder / "a.bin").read_bytes())
    stage([origin], destination)
    (copy,) = find_copies(tmp_path / "node0")
    assert (copy.names, copy.size_bytes) == (("deep/b.bin",), SIZE)
    assert evict(copy)
    assert [path.name for path in destination.rglob("*") if path.is_file()] == ["a.bin"]


def test_a_half_made_copy_can_be_evicted(tmp_path, monkeypatch):
    origin, destination = _origin(tmp_path, "half"), tmp_path / "node0" / "half" / "revision"

    def copy_one_and_die(wrong, right):
        file_placement.copy_file(wrong[0].source, wrong[0].target, file_placement.TransferProgress(_NoBar()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage([origin], destination, fetch=copy_one_and_die)
    (copy,) = find_copies(tmp_path / "node0")
    assert copy.size_bytes == SIZE
    assert evict(copy)
    assert not [path for path in (tmp_path / "node0").rglob("*") if path.is_file()]


def test_staging_makes_room_for_itself(disk, tmp_path, monkeypatch):
    _limit_space(monkeypatch, disk, SIZE)
    origin = _origin(tmp_path, "new")
    stage([origin], disk / "new" / "revision", eviction=Eviction("oldest", 30, disk))
    assert _left(disk) == {"second", "third", "new"}


class _NoBar:
    def advance(self, amount: int) -> None:
        pass

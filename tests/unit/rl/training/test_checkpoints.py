"""Checkpoints on disk: what counts as one, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.support.killing import run_child
from tests.support.rejections import rejected

from posttrain.errors import CheckpointError
from posttrain.rl.training.checkpoints import (
    CheckpointFolder,
    check_sizes,
    committed_checkpoints,
    write_seconds,
)
from posttrain.store import MANIFEST_NAME
from posttrain.store.lease import LeaseLostError

# What two ranks write: a shard each, and rank 0 the rest.
FILES = {"__0_0.distcp": b"first shard", "__1_0.distcp": b"second shard", ".metadata": b"where", "common.pt": b"rest"}


def write(checkpoints: CheckpointFolder, step: int) -> Path:
    fill(checkpoints, step)
    checkpoints.commit(step)
    return checkpoints.path(step)


def fill(checkpoints: CheckpointFolder, step: int) -> None:
    checkpoints.begin(step)
    for name, content in FILES.items():
        (checkpoints.partial(step) / name).write_bytes(content)
    records = [record for rank in (0, 1) for record in checkpoints.record_share(step, rank)]
    checkpoints.write_manifest(step, records)


def test_the_newest_is_the_one_with_most_steps(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    assert checkpoints.newest_step() == 0
    for step in (9, 10, 1_000_000):
        write(checkpoints, step)
        assert checkpoints.newest_step() == step


@pytest.mark.parametrize(
    ("keep", "written", "kept"),
    [
        (1, (2, 4, 6), [6]),
        (2, (2, 4, 6), [4, 6]),
        (3, (2, 4, 6), [2, 4, 6]),
        (3, (2,), [2]),
        (2, (999_998, 999_999, 1_000_000), [999_999, 1_000_000]),
        (2, (9, 10, 100), [10, 100]),
    ],
)
def test_so_many_of_the_newest_are_kept(tmp_path: Path, keep: int, written: tuple[int, ...], kept: list[int]) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep)
    for step in written:
        write(checkpoints, step)
    assert committed_checkpoints(tmp_path) == [(step, tmp_path / f"step_{step:06d}") for step in kept]
    assert checkpoints.newest_step() == kept[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step_{step:06d}" for step in kept)


def test_what_is_called_otherwise_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step_000007.partial", "step_000008.expired", "step_x", "step_", "a_step_000009", "step_10_old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000003").mkdir()
    assert committed_checkpoints(tmp_path) == [(3, tmp_path / "step_000003")]
    assert committed_checkpoints(tmp_path / "nowhere") == []


def test_names_of_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "a" / "b", keep=1)
    assert (tmp_path / "a" / "b").is_dir()
    assert checkpoints.path(20) == tmp_path / "a" / "b" / "step_000020"
    assert checkpoints.partial(20) == tmp_path / "a" / "b" / "step_000020.partial"
    CheckpointFolder(tmp_path / "a" / "b", keep=1)
    checkpoints.begin(20)
    with pytest.raises(FileExistsError):
        checkpoints.begin(20)


# ---- a commit, and what a kill leaves of it ----


def test_bytes_are_on_disk_before_the_name_and_the_name_before_anything_is_deleted(tmp_path, monkeypatch) -> None:
    happened: list[str] = []

    def seen(kind: str, *paths: object) -> None:
        happened.append(" ".join([kind, *(Path(path).relative_to(tmp_path).as_posix() for path in paths)]))

    sync, rename, remove = os.fsync, os.rename, shutil.rmtree
    checkpoints = CheckpointFolder(tmp_path, keep=1, may_commit=lambda: happened.append("may I?"))
    write(checkpoints, 2)
    fill(checkpoints, 4)
    happened.clear()
    monkeypatch.setattr(os, "fsync", lambda fd: (seen("sync", os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (seen("rename", a, b), rename(a, b)))
    monkeypatch.setattr(shutil, "rmtree", lambda path: (seen("delete", path), remove(path)))
    checkpoints.commit(4)
    names = [*FILES, MANIFEST_NAME]
    assert sorted(happened[: len(names)]) == sorted(f"sync step_000004.partial/{name}" for name in names)
    assert happened[len(names) :] == [
        "sync step_000004.partial",
        "may I?",
        "rename step_000004.partial step_000004",
        "sync .",
        "rename step_000002 step_000002.expired",
        "delete step_000002.expired",
    ]


def test_whenever_a_commit_is_killed_each_checkpoint_is_whole(tmp_path: Path) -> None:
    endings = []
    for point in range(1, 10):
        folder = tmp_path / str(point)
        checkpoints = CheckpointFolder(folder, keep=1)
        write(checkpoints, 2)
        fill(checkpoints, 4)
        endings.append(run_child(lambda checkpoints=checkpoints: checkpoints.commit(4), str(folder), point))
        committed = committed_checkpoints(folder)
        assert [step for step, _ in committed] in ([2], [2, 4], [4])
        for step, _ in committed:
            checkpoints.check_content(step)
        checkpoints.remove_leftovers()
        assert committed_checkpoints(folder) == committed
        if endings[-1] == 0:
            break
    assert endings == [-9, -9, -9, 0], "before the first rename, before the second, and before the folder goes"
    assert [step for step, _ in committed] == [4]


def test_a_checkpoint_that_was_half_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_a_file_and_die(folder: Path) -> None:
        min(folder.iterdir()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = CheckpointFolder(tmp_path, keep=1)
    write(checkpoints, 2)
    fill(checkpoints, 4)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_a_file_and_die)
        assert run_child(lambda: checkpoints.commit(4), str(tmp_path), point=0) == -9
    assert [step for step, _ in committed_checkpoints(tmp_path)] == [4]
    checkpoints.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_half_written_and_half_deleted_ones_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    folder = write(checkpoints, 2)
    checkpoints.begin(4)
    shutil.copytree(folder, tmp_path / "step_000001.expired")
    again = CheckpointFolder(tmp_path, keep=2)
    assert again.newest_step() == 2
    with caplog.at_level(logging.WARNING):
        again.remove_leftovers()
    assert f"{tmp_path / 'step_000004.partial'}: an earlier attempt ended while it was written" in caplog.text
    assert f"{tmp_path / 'step_000001.expired'}: an earlier attempt ended while it was deleted" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_run_that_has_a_checkpoint_keeps_what_it_began_with(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    first, second, third = ({"torch_dist": digit * 64} for digit in "012")
    assert checkpoints.begun_from(first) == first
    assert checkpoints.begun_from(second) == second, "nothing was learned from the first"
    write(checkpoints, 2)
    assert checkpoints.begun_from(third) == second


@pytest.mark.parametrize("content", ["", "{", "[1]", "7", "null"])
def test_what_a_run_began_with_is_never_guessed(tmp_path: Path, content: str) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    checkpoints.begun_from({"torch_dist": "1" * 64})
    write(checkpoints, 2)
    (tmp_path / "begun_from.json").write_text(content)
    with rejected("checkpoint-unreadable", "begun_from.json"):
        checkpoints.begun_from({"torch_dist": "1" * 64})


def test_another_beginning_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    checkpoints.begun_from({"torch_dist": "1" * 64})
    write(checkpoints, 2)
    checkpoints.begun_from({"torch_dist": "1" * 64})
    assert caplog.text == ""
    checkpoints.begun_from({"torch_dist": "2" * 64})
    assert "begun with other inputs" in caplog.text


def test_who_lost_the_lease_commits_nothing(tmp_path: Path) -> None:
    def refuse() -> None:
        raise LeaseLostError("another one writes")

    write(CheckpointFolder(tmp_path, keep=1), 2)
    late = CheckpointFolder(tmp_path, keep=1, may_commit=refuse)
    with pytest.raises(LeaseLostError):
        write(late, 4)
    assert late.newest_step() == 2
    assert late.path(2).exists(), "nor does it delete anything"


def test_every_file_is_in_the_manifest_once(tmp_path: Path) -> None:
    folder = write(CheckpointFolder(tmp_path, keep=1), 2)
    rows = json.loads((folder / MANIFEST_NAME).read_text())
    assert [row["path"] for row in rows] == sorted(FILES)
    assert [row["size_bytes"] for row in rows] == [len(FILES[name]) for name in sorted(FILES)]


@pytest.mark.parametrize("name", [*FILES, MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["missing", "cut short", "changed"])
def test_damage_is_named_by_one_of_the_ranks(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    path = write(checkpoints, 2) / name
    for rank in (0, 1):
        checkpoints.check_content(2, rank, num_ranks=2)
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    refusals = []
    for rank in (0, 1):
        try:
            checkpoints.check_content(2, rank, num_ranks=2)
        except CheckpointError as error:
            refusals.append(str(error))
    with rejected("manifest-mismatch", path):
        checkpoints.check_content(2)  # one rank alone reads all
    assert refusals
    assert str(path) in refusals[0]
    assert f"rm -r {checkpoints.path(2)}" in refusals[0]


def test_in_the_layout_of_the_save_a_rank_reads_what_it_wrote(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    damaged = write(checkpoints, 2) / "__1_0.distcp"
    damaged.write_bytes(b"other" + damaged.read_bytes()[5:])
    checkpoints.check_content(2, 0, num_ranks=2)
    with rejected("manifest-mismatch", "__1_0.distcp"):
        checkpoints.check_content(2, 1, num_ranks=2)
    found = [rank for rank in range(5) if is_refused(checkpoints, rank, num_ranks=5)]
    assert len(found) == 1, "in another layout some rank reads it"


def test_sizes_are_compared_without_reading(tmp_path: Path) -> None:
    folder = write(CheckpointFolder(tmp_path, keep=1), 2)
    assert check_sizes(folder) == []
    (folder / "common.pt").write_bytes(b"tser")
    assert check_sizes(folder) == []
    (folder / "__1_0.distcp").write_bytes(b"short")
    (folder / ".metadata").unlink()
    lines = check_sizes(folder)
    assert lines == [
        f"{folder / '.metadata'}: missing, expected 5 bytes",
        f"{folder / '__1_0.distcp'}: 5 bytes, expected 12",
    ]


MANIFESTS = ["{", "[]", "{}", "null", "7", "[1]", '[{"path": "a"}]', '[{"path": 5, "size_bytes": 1, "xxh3_128": ""}]']


@pytest.mark.parametrize("content", MANIFESTS)
def test_a_manifest_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    folder = write(checkpoints, 2)
    (folder / MANIFEST_NAME).write_text(content)
    (line,) = check_sizes(folder)
    assert line.startswith(f"{folder / MANIFEST_NAME}: cannot be read (")
    for rank in range(3):
        assert is_refused(checkpoints, rank, num_ranks=3)


def test_a_disk_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    write(checkpoints, 2)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("posttrain.store.receipts.hash_file", fail)
    with rejected("manifest-mismatch", "Input/output error", "/step_000002/.metadata'"):
        checkpoints.check_content(2)


@pytest.mark.parametrize(
    ("num_ranks", "shares"),
    [
        # As written: each rank its own shard, and the first the rest with it.
        (2, [[".metadata", "__0_0.distcp", "common.pt"], ["__1_0.distcp"]]),
        # In another layout: every so many-th.
        (1, [[".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt"]]),
        (3, [[".metadata", "common.pt"], ["__0_0.distcp"], ["__1_0.distcp"]]),
        (5, [[".metadata"], ["__0_0.distcp"], ["__1_0.distcp"], ["common.pt"], []]),
    ],
)
def test_each_rank_reads_its_share(tmp_path: Path, num_ranks: int, shares: list[list[str]]) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    folder = write(checkpoints, 2)
    for name in FILES:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[::-1])
        refused = [is_refused(checkpoints, rank, num_ranks) for rank in range(num_ranks)]
        assert refused == [name in share for share in shares]
        (folder / name).write_bytes(content)


def test_ranks_beyond_nine_and_files_beyond_the_first_are_their_writers(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.begin(2)
    for name in ("__10_0.distcp", "__1_12.distcp", "__0_0.distcp", "common.pt", "x__1_0.distcp", "__1_0.distcp.tmp"):
        (checkpoints.partial(2) / name).touch()
    shares = [[record.path for record in checkpoints.record_share(2, rank)] for rank in (0, 1, 2, 10)]
    assert shares == [
        ["__0_0.distcp", "__1_0.distcp.tmp", "common.pt", "x__1_0.distcp"],
        ["__1_12.distcp"],
        [],
        ["__10_0.distcp"],
    ]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ({}, 0.0),
        ({3: (100.0, 103.0, 101.0)}, 3.0),
        ({3: (100.0, 200.0), 5: (300.0, 307.0, 305.0)}, 7.0),  # of the newest, which is not the longest
        ({3: (100.0, 101.0), 5: (300.0, 340.0)}, 40.0),
        ({5: (300.0,)}, 0.0),
    ],
)
def test_how_long_the_newest_took(tmp_path: Path, written: dict[int, tuple[float, ...]], seconds: float) -> None:
    for step, times in written.items():
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        for number, when in enumerate(times):
            (folder / f"__{number}_0.distcp").touch()
            os.utime(folder / f"__{number}_0.distcp", (when, when))
    assert write_seconds(tmp_path) == seconds


def test_how_long_is_asked_again_where_the_newest_expires_meanwhile(tmp_path: Path, monkeypatch) -> None:
    for step, times in ((3, (100.0, 104.0)), (5, (200.0, 209.0))):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        for number, when in enumerate(times):
            (folder / str(number)).touch()
            os.utime(folder / str(number), (when, when))
    listed = Path.iterdir

    def iterdir(self: Path):
        if self.name == "step_000005":
            self.rename(self.with_suffix(".expired"))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert write_seconds(tmp_path) == 4.0


def is_refused(checkpoints: CheckpointFolder, rank: int, num_ranks: int) -> bool:
    try:
        checkpoints.check_content(2, rank, num_ranks)
    except CheckpointError:
        return True
    return False

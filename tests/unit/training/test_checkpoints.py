"""Checkpoints on disk: what counts as one, what is kept, what is refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from posttrain.artifacts.lease import LeaseLostError
from posttrain.errors import CheckpointError
from posttrain.training.checkpoints import MANIFEST_NAME, CheckpointFolder

# What two ranks write: a shard each, and rank 0 the rest.
FILES = {"__0_0.distcp": b"first shard", "__1_0.distcp": b"second shard", ".metadata": b"where", "common.pt": b"rest"}


def write(checkpoints: CheckpointFolder, step: int) -> Path:
    checkpoints.begin(step)
    for name, content in FILES.items():
        (checkpoints.partial(step) / name).write_bytes(content)
    records = [record for rank in (0, 1) for record in checkpoints.record_share(step, rank)]
    checkpoints.write_manifest(step, records)
    checkpoints.commit(step)
    return checkpoints.path(step)


def test_the_newest_is_the_one_with_most_steps(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    assert checkpoints.newest_step() == 0
    for step in (9, 10, 1_000_000):
        write(checkpoints, step)
        assert checkpoints.newest_step() == step


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for step in (2, 4, 6):
        write(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000006"]


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
    assert refusals
    assert str(path) in refusals[0]
    assert f"rm -r {checkpoints.path(2)}" in refusals[0]


def test_in_the_layout_of_the_save_a_rank_reads_what_it_wrote(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    damaged = write(checkpoints, 2) / "__1_0.distcp"
    damaged.write_bytes(b"other" + damaged.read_bytes()[5:])
    checkpoints.check_content(2, 0, num_ranks=2)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        checkpoints.check_content(2, 1, num_ranks=2)
    found = [rank for rank in range(5) if is_refused(checkpoints, rank, num_ranks=5)]
    assert len(found) == 1, "in another layout some rank reads it"


def is_refused(checkpoints: CheckpointFolder, rank: int, num_ranks: int) -> bool:
    try:
        checkpoints.check_content(2, rank, num_ranks)
    except CheckpointError:
        return True
    return False

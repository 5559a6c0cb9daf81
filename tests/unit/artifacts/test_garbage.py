"""What is freed of a store, and above all what is not."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from posttrain.artifacts import (
    Receipt,
    part_receipt_of,
    partial_of,
    receipt_of,
    record_files,
    write_json,
    write_receipt,
)
from posttrain.artifacts.build_lock import lock_folder_of
from posttrain.artifacts.garbage import Stored, delete_unused, freed_bytes, list_store
from posttrain.artifacts.lease import Lease
from posttrain.artifacts.references import Reference, references_folder

OLD_SECONDS = 30 * 86_400
DAYS = 14
NAMES = ["datasets/jsonl-1", "glm5/abc/hf", "glm5/abc/hf_patched-1", "glm5/abc/torch_dist-1"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three finished artefacts and one half made, all old; the patched one shares its weights with the origin."""
    store = tmp_path / "store"
    for name in NAMES[:3]:
        folder = store / name
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(os.urandom(100_000))
    patched = store / NAMES[2] / "weights"
    patched.unlink()
    patched.hardlink_to(store / NAMES[1] / "weights")
    for name in NAMES[:3]:
        write_receipt(receipt_of(store / name), Receipt("patch_hf_config", record_files(store / name), {}, {}))
    partial = partial_of(store / NAMES[3])
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(bytes(50_000))
    write_receipt(part_receipt_of(store / NAMES[3], 0), Receipt("convert_hf_to_torch_dist", (), {}, {"part": 0}))
    make_old(store)
    return store


def make_old(store: Path) -> None:
    then = time.time() - OLD_SECONDS
    for path in [store, *store.rglob("*")]:
        os.utime(path, (then, then))


def refer(store: Path, run: Path, names: list[str], started: float = 0.0) -> Path:
    """Let a run use artefacts."""
    reference = Reference(str(run), str(run.parent), "ada", "node7", started, tuple(names))
    path = references_folder(store) / f"{run.name}.json"
    write_json(path, dataclasses.asdict(reference))
    return path


def unused(store: Path) -> list[str]:
    return [found.folder.relative_to(store).as_posix() for found in list_store(store, DAYS) if found.is_unused]


def find(store: Path, name: str) -> Stored:
    return next(found for found in list_store(store, DAYS) if found.folder == store / name)


def test_everything_is_listed_and_without_users_unused(store: Path) -> None:
    found = list_store(store, DAYS)
    assert [row.folder.relative_to(store).as_posix() for row in found] == NAMES
    assert [row.is_finished for row in found] == [True, True, True, False]
    assert unused(store) == NAMES


def test_what_a_run_uses_stays(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "results/first"
    run.mkdir(parents=True)
    path = refer(store, run, NAMES[1:3])
    assert unused(store) == [NAMES[0], NAMES[3]]
    assert find(store, NAMES[1]).users[0].run == str(run)
    run.rmdir()
    assert unused(store) == NAMES, "the run was deleted"
    run.parent.rmdir()
    assert unused(store) == [NAMES[0], NAMES[3]], "its file system is not here"
    run.parent.mkdir()
    delete_unused(store, DAYS)
    assert not path.exists()


def test_a_run_that_has_just_begun_has_no_folder_yet(store: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    refer(store, tmp_path / "results/first", NAMES[1:3], time.time() - 60)
    assert unused(store) == [NAMES[0], NAMES[3]]


def test_what_changed_lately_stays(store: Path) -> None:
    (partial_of(store / NAMES[3]) / "__0_0.distcp").touch()
    receipt_of(store / NAMES[1]).touch()
    assert unused(store) == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize("part", [False, True])
def test_what_is_being_made_stays(store: Path, part: bool) -> None:
    receipt = part_receipt_of(store / NAMES[3], 0) if part else receipt_of(store / NAMES[3])
    with Lease(receipt, lock_folder_of(receipt)):
        make_old(store)
        assert unused(store) == NAMES[:3]
        assert f"process {os.getpid()} on " in find(store, NAMES[3]).builder
        delete_unused(store, DAYS)
        assert partial_of(store / NAMES[3]).is_dir()
    make_old(store)
    assert unused(store) == [NAMES[3]]


def test_bytes_are_counted_as_the_disk_does(store: Path) -> None:
    weights = (store / NAMES[1] / "weights").stat().st_blocks * 512
    assert freed_bytes([find(store, NAMES[1])]) < weights, "the patched checkpoint still holds them"
    assert freed_bytes([find(store, NAMES[1]), find(store, NAMES[2])]) > weights


def test_deleting_leaves_nothing_of_what_is_unused_and_all_of_the_rest(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "results/first"
    run.mkdir(parents=True)
    refer(store, run, NAMES[1:2])
    gone = delete_unused(store, DAYS)
    assert [found.folder for found in gone] == [store / NAMES[0], store / NAMES[2], store / NAMES[3]]
    assert [found.folder for found in list_store(store, DAYS)] == [store / NAMES[1]]
    assert sorted(path.name for path in (store / "glm5/abc").iterdir()) == ["hf", "hf.history.jsonl", "hf.receipt.json"]

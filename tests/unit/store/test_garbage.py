"""What is freed of a store, and above all what is not."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.support.system_calls import Calls

from posttrain.store import (
    Receipt,
    part_receipt_of,
    partial_of,
    receipt_of,
    record_files,
    write_json,
    write_receipt,
)
from posttrain.store.build_lock import lock_folder_of
from posttrain.store.garbage import Stored, delete_unused, freed_bytes, list_store
from posttrain.store.lease import Lease, living_holder
from posttrain.store.references import Reference, references_folder

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


def disk_usage(*files: Path) -> int:
    """What `du` says."""
    told = subprocess.run(["du", "--block-size=1", *files], capture_output=True, text=True, check=True).stdout
    return sum(int(line.split()[0]) for line in told.splitlines())


def test_bytes_are_counted_as_the_disk_does(store: Path) -> None:
    weights = (store / NAMES[1] / "weights").stat().st_blocks * 512
    assert freed_bytes([find(store, NAMES[1])]) < weights, "the patched checkpoint still holds them"
    assert freed_bytes([find(store, NAMES[1]), find(store, NAMES[2])]) > weights
    folder = store / NAMES[0]
    files = [folder / "weights", receipt_of(folder), folder.with_name(f"{folder.name}.history.jsonl")]
    assert freed_bytes([find(store, NAMES[0])]) == disk_usage(*files)


def test_deleting_leaves_nothing_of_what_is_unused_and_all_of_the_rest(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "results/first"
    run.mkdir(parents=True)
    refer(store, run, NAMES[1:2])
    gone, errors = delete_unused(store, DAYS)
    assert errors == []
    assert [found.folder for found in gone] == [store / NAMES[0], store / NAMES[2], store / NAMES[3]]
    assert [found.folder for found in list_store(store, DAYS)] == [store / NAMES[1]]
    assert sorted(path.name for path in (store / "glm5/abc").iterdir()) == ["hf", "hf.history.jsonl", "hf.receipt.json"]


# ---- what is ours ----


def names(store: Path) -> list[str]:
    return [found.folder.relative_to(store).as_posix() for found in list_store(store, DAYS)]


@pytest.mark.parametrize("beside", ["manifest.json", "history.jsonl", "receipt.json", "partial", "parts", "lease"])
def test_a_users_own_folder_is_no_artefact_whatever_lies_beside_it(store: Path, beside: str) -> None:
    """Only a step's receipt or lease makes it one."""
    mine = store / "glm5" / "abc" / "mydata"
    mine.mkdir()
    (mine / "precious").write_text("x")
    other = mine.with_name(f"mydata.{beside}")
    other.write_text("{}") if "json" in beside else other.mkdir()
    (mine.parent / "deep.receipt.json").write_text("[" * 200_000)
    make_old(store)
    assert names(store) == NAMES
    delete_unused(store, DAYS)
    assert (mine / "precious").exists()
    assert other.exists()


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_listed_is_the_users_until_a_part_of_it_is_brought(store: Path, begun: bool) -> None:
    """Files of a repository that were put into the store by hand, of which so far only the list was made."""
    hand, name = store / "glm5" / "def" / "hf", "glm5/def/hf"
    hand.mkdir(parents=True)
    write_json(hand.with_name("hf.manifest.json"), {"source": {}, "files": []})
    with Lease(hand, lock_folder_of(receipt_of(hand))):
        pass
    if begun:
        with Lease(hand, lock_folder_of(part_receipt_of(hand, 0))):
            pass
    make_old(store)
    assert (name in names(store)) == begun
    delete_unused(store, DAYS)
    assert hand.exists() != begun
    hand.mkdir(exist_ok=True)
    hand.rmdir()
    if not begun:
        assert name in names(store), "without the user's folder there is only the list"


def test_receipts_of_other_versions_are_ours_too(store: Path) -> None:
    path = receipt_of(store / NAMES[1])
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))
    shutil.rmtree(store / "glm5/abc/torch_dist-1.parts")
    make_old(store)
    assert names(store) == NAMES[:3], "a partial folder without receipt or lease is nobody's"
    path.write_text('{"step": "", "format_version": 0, "files": [], "digest": ""}')
    assert names(store) == NAMES[:3], "no more is asked of a receipt"


def test_what_lies_behind_a_link_is_not_of_this_store(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (store / "glm5").rename(other)
    (store / "linked").symlink_to(other)
    (store / "datasets" / "mine.receipt.json").symlink_to(receipt_of(other / "abc/hf"))
    (store / "datasets" / "mine").mkdir()
    assert names(store) == NAMES[:1]


@pytest.mark.parametrize("function", ["scandir", "listdir"])
def test_what_we_may_not_read_is_named_and_left_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """A folder of another user; or the parts of an artefact, whose makers we cannot see."""
    closed = store / "glm5" / "abc" if function == "scandir" else part_receipt_of(store / NAMES[3], 0).parent
    read = getattr(os, function)

    def refuse(path: Path) -> object:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(os, function, refuse)
    assert names(store) == (NAMES[:1] if function == "scandir" else NAMES[:3])
    told = "not looked into" if function == "scandir" else "not looked at"
    messages = [row.getMessage() for row in caplog.records]
    assert messages == [f"{told}: [Errno 13] Permission denied: '{closed}'"]


def test_a_link_goes_and_what_it_points_to_stays(store: Path, tmp_path: Path) -> None:
    shared, linked = tmp_path / "shared", store / NAMES[1]
    linked.rename(shared)
    linked.symlink_to(shared)
    make_old(store)
    weights = shared / "weights"
    assert freed_bytes([find(store, NAMES[1])]) < 100_000, "a link frees nothing of what is behind it"
    gone, errors = delete_unused(store, DAYS)
    assert [found.folder for found in gone] == [store / name for name in NAMES]
    assert errors == []
    assert weights.exists()
    assert not linked.is_symlink()


def test_after_an_error_the_others_are_deleted_all_the_same(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmtree = shutil.rmtree

    def fail(path: Path, *more: object, **options: object) -> None:
        if path == store / NAMES[1]:
            raise PermissionError(13, "Permission denied", str(path))
        rmtree(path, *more, **options)

    monkeypatch.setattr(shutil, "rmtree", fail)
    gone, errors = delete_unused(store, DAYS)
    assert [found.folder for found in gone] == [store / name for name in (NAMES[0], *NAMES[2:])]
    assert errors == [f"{store / NAMES[1]}: [Errno 13] Permission denied: '{store / NAMES[1]}'"]
    assert living_holder(lock_folder_of(receipt_of(store / NAMES[1]))) is None
    assert not receipt_of(store / NAMES[1]).exists(), "something half made, which the next gc deletes"
    monkeypatch.undo()
    make_old(store)
    assert names(store) == [NAMES[1]]
    assert len(delete_unused(store, DAYS)[0]) == 1
    assert list((store / "glm5" / "abc").iterdir()) == []


@pytest.mark.parametrize("damage", ["lease", "folder"])
def test_what_cannot_be_understood_stays_and_is_named(
    store: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    lock, began = lock_folder_of(receipt_of(store / NAMES[1])), time.time()
    if damage == "lease":
        lock.mkdir()
        (lock / "epoch-000001.json").write_text("{")
    else:
        lock.touch()
    make_old(store)
    assert unused(store) == [name for name in NAMES if name != NAMES[1]]
    assert f"{store / NAMES[1]} stays: " in caplog.text
    found = find(store, NAMES[1])
    assert (found.users, found.builder, found.is_finished) == ((), "", False)
    # Clocks of file systems tick some milliseconds apart.
    assert began - 1 <= found.last_change_unix <= time.time()
    delete_unused(store, DAYS)
    assert (store / NAMES[1] / "weights").exists()
    assert receipt_of(store / NAMES[1]).exists()


# ---- what is deleted, and in which order ----


def test_the_receipt_goes_first_and_the_locks_last(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any point leaves something half made that nobody begins to make before all of it is gone."""
    folder, removed = store / NAMES[3], []
    write_receipt(receipt_of(folder), Receipt("finalize_torch_dist", (), {}, {}))
    folder.mkdir()
    make_old(store)
    rmtree = shutil.rmtree

    def remove(path: Path, *more: object, **options: object) -> None:
        if path.name.startswith(folder.name):
            assert not receipt_of(folder).exists()
            removed.append(path.name.removeprefix(folder.name))
            lock = lock_folder_of(receipt_of(folder))
            assert (living_holder(lock) is not None) == lock.exists()
        rmtree(path, *more, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    calls = Calls(monkeypatch)
    delete_unused(store, DAYS)
    assert removed == ["", ".partial", ".parts", ".lease"]
    moved = calls.made.index(("rename", str(receipt_of(folder)), f"{folder}.receipt.deleted"))
    synced = calls.made.index(("fsync", str(folder.parent)), moved)
    first = calls.made.index(("unlink", f"{folder}.history.jsonl"))
    assert moved < synced < first
    assert not list((store / "glm5" / "abc").glob("torch_dist-1*"))


@pytest.mark.parametrize("when", ["after the listing", "when the receipt is gone"])
def test_what_a_run_takes_meanwhile_stays(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run, folder = tmp_path / "results/first", store / NAMES[1]
    run.mkdir(parents=True)
    before = receipt_of(folder).read_bytes()

    def take(name: str, *paths: str) -> None:
        is_first = not references_folder(store).exists()
        moves = name == "rename" and paths[0] == str(receipt_of(folder))
        locks = name == "link" and paths[-1].startswith(str(lock_folder_of(receipt_of(folder))))
        if is_first and (locks if when == "after the listing" else moves):
            refer(store, run, [NAMES[1]])

    calls = Calls(monkeypatch, take)
    gone, errors = delete_unused(store, DAYS)
    assert [found.folder for found in gone] == [store / name for name in (NAMES[0], *NAMES[2:])]
    assert errors == []
    assert receipt_of(folder).read_bytes() == before
    assert (folder / "weights").exists()
    moved = [call for call in calls.of("rename") if str(receipt_of(folder)) in call]
    assert len(moved) == (0 if when == "after the listing" else 2)


def test_what_somebody_begins_to_make_meanwhile_stays(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list_store(store, DAYS)
    monkeypatch.setattr("posttrain.store.garbage.list_store", lambda *_: listed)
    with Lease(store, lock_folder_of(part_receipt_of(store / NAMES[3], 0))):
        gone, errors = delete_unused(store, DAYS)
        assert partial_of(store / NAMES[3]).is_dir()
    assert [found.folder for found in gone] == [store / name for name in NAMES[:3]]
    assert errors == []


# ---- what is shown ----


@pytest.mark.parametrize(("age_days", "is_unused"), [(13.99, False), (14.01, True)])
def test_how_long_something_must_have_been_left_alone(store: Path, age_days: float, is_unused: bool) -> None:
    then = time.time() - age_days * 86_400
    for path in [store, *store.rglob("*")]:
        os.utime(path, (then, then))
    assert (unused(store) == NAMES) == is_unused
    assert all(abs(found.last_change_unix - then) < 1 for found in list_store(store, DAYS))


def test_after_exactly_that_long_it_may_go(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = 1_700_000_000
    for path in [store, *store.rglob("*")]:
        os.utime(path, (then, then))
    monkeypatch.setattr(time, "time", lambda: float(then + DAYS * 86_400))
    assert unused(store) == NAMES


@pytest.mark.parametrize(
    "changed",
    ["hf", "hf.receipt.json", "hf.history.jsonl", "hf.manifest.json", "hf.parts", "hf.parts/x", "hf.partial/a/b"],
)
def test_whatever_of_it_changed_counts(store: Path, changed: str) -> None:
    path = store / "glm5" / "abc" / changed
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    make_old(store)
    assert unused(store) == NAMES
    path.touch()
    assert NAMES[1] not in unused(store)


def test_several_makers_are_all_named(store: Path) -> None:
    folder = store / NAMES[3]
    with Lease(folder, lock_folder_of(receipt_of(folder))), Lease(folder, lock_folder_of(part_receipt_of(folder, 0))):
        first, second = find(store, NAMES[3]).builder.split("; ")
        assert first.startswith(f"process {os.getpid()} on ")
        assert second.startswith(f"process {os.getpid()} on ")

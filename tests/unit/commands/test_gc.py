import dataclasses
import os
import time

import pytest
from tests.support.forked_programs import run_posttrain
from tests.support.small_disk import small_disk

from posttrain.store import Receipt, receipt_of, record_files, write_json, write_receipt
from posttrain.store.references import Reference, references_folder


@pytest.fixture
def folder(tmp_path):
    """An old artefact that nobody uses."""
    folder = tmp_path / "store" / "datasets" / "jsonl-1"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(bytes(100_000))
    write_receipt(receipt_of(folder), Receipt("download_dataset", record_files(folder), {}, {}))
    then = time.time() - 30 * 86_400
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (then, then))
    return folder


def gc(store, *more, unused_days=14, code=0):
    chosen = f"set=site.store={store} site.unused_days={unused_days}"
    done = run_posttrain("gc", chosen, *more)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_it_shows_and_deletes_only_on_demand(tmp_path, folder):
    store = tmp_path / "store"
    kept = gc(store, unused_days=40)
    assert "0 can be freed" in kept
    assert "finished, no run uses it; kept until 40 days after its last change" in kept
    shown = gc(store)
    assert "datasets/jsonl-1" in shown
    assert "finished, unused" in shown
    assert "1 can be freed" in shown
    assert "nothing was deleted" in shown
    assert folder.exists()
    assert "1 of 1 deleted" in gc(store, "gc=delete")
    assert list(folder.parent.iterdir()) == []


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert "0 can be freed" in gc(tmp_path / "none")


def test_what_others_have_written_is_shown_and_not_obeyed(tmp_path, folder):
    reference = Reference(str(tmp_path), str(tmp_path), "\x1b[2Jada", "node7", 0.0, ("datasets/jsonl-1",))
    write_json(references_folder(tmp_path / "store") / "a.json", dataclasses.asdict(reference))
    shown = gc(tmp_path / "store")
    assert "\x1b" not in shown
    assert "\\x1b[2Jada" in shown
    write_json(references_folder(tmp_path / "store") / "a.json", {**dataclasses.asdict(reference), "user": "[red]ada"})
    assert "[red]ada" in gc(tmp_path / "store")


def test_what_cannot_be_deleted_is_told_after_all_else_is_gone(tmp_path, folder):
    other = folder.with_name("jsonl-2")
    other.mkdir()
    write_receipt(receipt_of(other), Receipt("download_dataset", (), {}, {}))
    then = time.time() - 30 * 86_400
    with small_disk(folder, "size=1m"):
        for path in (tmp_path / "store").rglob("*"):
            os.utime(path, (then, then))
        told = gc(tmp_path / "store", "--delete", code=1)
    assert "1 of 2 deleted" in told
    assert f"not everything could be deleted; all else was:\n  {folder}: [Errno 16] Device or resource busy" in told
    assert not other.exists()

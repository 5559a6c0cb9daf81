import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.artifacts import Receipt, receipt_of, record_files, write_receipt

REPOSITORY = Path(__file__).resolve().parents[2]


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


def gc(store, *more):
    command = [sys.executable, REPOSITORY / "scripts/gc.py", "--store", store, *more]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_it_shows_and_deletes_only_on_demand(tmp_path, folder):
    store = tmp_path / "store"
    assert "0 can be freed" in gc(store, "--unused-days", "40")
    shown = gc(store, "--unused-days", "14")
    assert "datasets/jsonl-1" in shown
    assert "finished, unused" in shown
    assert "1 can be freed" in shown
    assert "nothing was deleted" in shown
    assert folder.exists()
    assert "1 of 1 deleted" in gc(store, "--unused-days", "14", "--delete")
    assert list(folder.parent.iterdir()) == []


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert "0 can be freed" in gc(tmp_path / "none", "--unused-days", "14")

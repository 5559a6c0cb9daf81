import json
import os

import pytest
from tests.support.downloading import NEEDED, StoreFolder, from_folder
from tests.support.small_checkpoint import make_small_checkpoint

from posttrain.store import manifest_of, part_receipt_of, partial_of, read_receipt, receipt_of


@pytest.fixture
def store(tmp_path):
    store = StoreFolder(tmp_path / "store", num_parts=2)
    make_small_checkpoint(tmp_path / "origin")
    assert store.run("list_hf_checkpoint", *from_folder(tmp_path / "origin")).returncode == 0
    for part in range(2):
        assert store.run("download_hf_checkpoint", part=part).returncode == 0
    return store


def _refusal(store):
    done = store.run("finalize_hf_checkpoint")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not receipt_of(store.folder).exists()
    return done.stderr


def test_the_parts_become_one_receipt_and_those_of_another_split_go(store):
    stale = part_receipt_of(store.folder, 7)
    stale.write_text("{}")
    assert store.run("finalize_hf_checkpoint").returncode == 0
    receipt = read_receipt(receipt_of(store.folder))
    assert [record.path for record in receipt.files] == NEEDED
    assert (receipt.inputs, receipt.settings) == ({}, {})
    assert sorted(path.name for path in stale.parent.glob("*.receipt.json")) == ["0.receipt.json", "1.receipt.json"]


def test_a_part_of_another_list(store):
    manifest = manifest_of(store.folder)
    row = json.loads(manifest.read_text())
    row["files"][0]["size_bytes"] += 1
    manifest.write_text(json.dumps(row))
    text = _refusal(store)
    assert text.count("not a part of this list") == 2


def test_a_file_that_no_part_has_brought(store):
    store.num_parts = 1
    text = _refusal(store)
    assert text.count("in no part") == len(NEEDED) // 2


def test_a_file_that_changed_after_it_was_verified(store):
    path = partial_of(store.folder) / NEEDED[0]
    later = part_receipt_of(store.folder, 1).stat().st_mtime + 10
    os.utime(path, (later, later))
    assert f"{path}: changed after it was verified" in _refusal(store)

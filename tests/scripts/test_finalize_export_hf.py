import random

import pytest
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_export,
    make_store,
    make_torch_dist,
    run_here,
)
from tests.support.killing import run_killed

from posttrain.artifacts import part_receipt_of, read_receipt, receipt_of
from posttrain.checkpoint.export import final_weights_sha256
from posttrain.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    """All parts are there."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    for part in range(NUM_PARTS):
        run_here("export_hf", store.export(part))
    return store


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder = store.folder("hf")
    points = sorted(random.Random(7).sample(range(1, 20), 7))
    endings = run_killed(
        "finalize_export_hf",
        store.finalize_export(),
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    make_export(store, "undisturbed")
    assert_same_folder(folder, store.folder("undisturbed"))
    for shard in folder.glob("*.safetensors"):
        assert shard.read_bytes() == (store.source / shard.name).read_bytes(), "converted and exported: the origin"


def test_the_hash_of_all_weights_is_taken_while_they_are_written(store):
    run_here("finalize_export_hf", store.finalize_export())
    receipt = read_receipt(receipt_of(store.folder("hf")))
    assert receipt.settings == {"final_weights_sha256": final_weights_sha256(store.source)}


def test_a_missing_part_is_refused(store):
    part_receipt_of(store.folder("hf"), 1).unlink()
    with pytest.raises(CheckpointError, match="no such receipt"):
        run_here("finalize_export_hf", store.finalize_export())
    assert not store.folder("hf").exists()

import json
import random

import pytest
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_rollout_fp8,
    make_store,
    run_here,
)
from tests.support.killing import run_killed

from posttrain.artifacts import part_receipt_of, read_receipt, receipt_of
from posttrain.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    """All parts are there."""
    store = make_store(tmp_path / "store")
    for part in range(NUM_PARTS):
        run_here("quantize_rollout_fp8", store.part("rollout_fp8", part))
    return store


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder = store.folder("rollout_fp8")
    points = sorted(random.Random(5).sample(range(1, 26), 7))
    endings = run_killed(
        "finalize_rollout_fp8",
        store.finalize("rollout_fp8"),
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    undisturbed = make_store(tmp_path / "undisturbed")
    make_rollout_fp8(undisturbed)
    assert_same_folder(folder, undisturbed.folder("rollout_fp8"))
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    source = read_receipt(receipt_of(store.source)).digest
    assert read_receipt(receipt_of(folder)).inputs == {"hf_patched": source}


def test_a_part_that_has_not_finished_is_named(store):
    part_receipt_of(store.folder("rollout_fp8"), 1).unlink()
    with pytest.raises(CheckpointError, match=r"1\.receipt\.json: no such receipt; the step before has not"):
        run_here("finalize_rollout_fp8", store.finalize("rollout_fp8"))

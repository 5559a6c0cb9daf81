import os
import random

import pytest
import torch
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_store,
    make_torch_dist,
    run_here,
)
from tests.support.killing import run_killed
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.torch_dist import verify_torch_dist
from posttrain.store import partial_of, read_receipt, receipt_of


@pytest.fixture
def store(tmp_path):
    """All parts are there."""
    store = make_store(tmp_path / "store")
    for part in range(NUM_PARTS):
        run_here("convert_hf_to_torch_dist", store.part("torch_dist", part))
    return store


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder = store.folder("torch_dist")
    points = sorted(random.Random(2).sample(range(1, 22), 7))
    endings = run_killed(
        "finalize_torch_dist",
        [*store.finalize("torch_dist"), "--verify"],
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    undisturbed = make_store(tmp_path / "undisturbed")
    make_torch_dist(undisturbed)
    assert_same_folder(folder, undisturbed.folder("torch_dist"))
    assert verify_torch_dist(store.source, folder, TINY) == 117


def test_it_can_run_again_alone(store):
    run_here("finalize_torch_dist", store.finalize("torch_dist"))
    folder = store.folder("torch_dist")
    before = read_receipt(receipt_of(folder))
    receipt_of(folder).unlink()
    run_here("finalize_torch_dist", store.finalize("torch_dist"))
    assert read_receipt(receipt_of(folder)) == before


def test_a_part_that_runs_again_after_it_finds_its_files(store):
    run_here("finalize_torch_dist", store.finalize("torch_dist"))
    run_here("convert_hf_to_torch_dist", store.part("torch_dist", 0))
    assert store.folder("torch_dist").exists()
    assert receipt_of(store.folder("torch_dist")).exists()


def test_verify_keeps_a_damaged_checkpoint_from_its_name(store):
    folder = store.folder("torch_dist")
    path = partial_of(folder) / "__1_0.distcp"
    raw, status = bytearray(path.read_bytes()), path.stat()
    raw[raw.index(CheckpointReader(store.source).tensor("lm_head.weight").view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a bad disk leaves it
    with rejected("conversion-differs", "__1_0.distcp", "output_layer.weight"):
        run_here("finalize_torch_dist", [*store.finalize("torch_dist"), "--verify"])
    assert not folder.exists()
    assert not receipt_of(folder).exists()


def test_parts_of_an_older_source_are_refused(store):
    other = make_store(store.root / "other")
    (other.source / "config.json").write_text("{}")
    receipt_of(other.source).unlink()
    with rejected("receipt-missing"):
        run_here("finalize_torch_dist", other.finalize("torch_dist"))

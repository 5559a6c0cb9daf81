import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_store import DIMENSIONS, Store, make_store, make_torch_dist, run_here
from tests.support.killing import run_killed
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.errors import CheckpointError
from posttrain.store import Receipt, read_receipt, receipt_of, record_files, require_files, write_receipt


@pytest.fixture
def store(tmp_path):
    """A store with a conversion that somebody else made, under another name."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    shutil.copytree(store.folder("torch_dist"), store.root / "adopted")
    return store


def _arguments(store: Store, adopted: str = "adopted"):
    folder = store.folder("taken")
    return [
        *("--source", store.source, "--source-receipt", receipt_of(store.source), "--adopted", store.root / adopted),
        *("--folder", folder, *DIMENSIONS, "--receipt", receipt_of(folder)),
    ]


def _refusal(store: Store) -> str:
    with pytest.raises(CheckpointError) as raised:
        run_here("adopt_torch_dist", _arguments(store))
    assert not receipt_of(store.folder("taken")).exists()
    assert not store.folder("taken").exists()
    return str(raised.value)


def test_an_equal_checkpoint_is_linked_and_survives_kills(store):
    adopted, folder = store.root / "adopted", store.folder("taken")
    before = record_files(adopted)
    points = random.Random(3).sample(range(1, 14), 5)
    endings = run_killed(
        "adopt_torch_dist", _arguments(store), store.root, [*points, 10**9], claim=(folder, receipt_of(folder))
    )
    assert endings.count(-9) >= 3
    assert endings[-1] == 0
    receipt = require_files(folder, receipt_of(folder), content=True)
    assert receipt.files == read_receipt(receipt_of(store.folder("torch_dist"))).files
    assert receipt.inputs == read_receipt(receipt_of(store.folder("torch_dist"))).inputs
    assert (folder / "__0_0.distcp").samefile(adopted / "__0_0.distcp")
    assert record_files(adopted) == before


def test_a_file_that_is_too_short(store):
    path = store.root / "adopted" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    assert f"{path}: {path.stat().st_size} bytes, at least" in _refusal(store)


def test_a_file_that_is_missing(store):
    (store.root / "adopted" / "common.pt").unlink()
    assert "common.pt missing" in _refusal(store)


def test_one_flipped_bit_is_named_with_its_tensor(store):
    path = store.root / "adopted" / "__1_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[raw.index(CheckpointReader(store.source).tensor("lm_head.weight").view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(raw)
    assert "the checksum of output_layer.weight does not fit" in _refusal(store)


def test_another_model_of_the_same_shape_is_not_taken(store):
    reader = CheckpointReader(store.source)
    shard = store.source / reader.file_of("model.norm.weight")
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    write_receipt(receipt_of(store.source), Receipt("patch_hf_config", record_files(store.source), {}, {}))
    assert "decoder.final_layernorm.weight at [0] is not model.norm.weight bit by bit" in _refusal(store)


def test_a_folder_that_does_not_exist(store):
    with rejected("no-such-checkpoint", key="download.torch_dist_folder"):
        run_here("adopt_torch_dist", _arguments(store, "nowhere"))

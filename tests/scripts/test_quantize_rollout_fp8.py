import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_store import make_rollout_fp8, make_store, run_here
from tests.support.killing import run_killed

from posttrain.artifacts import (
    Receipt,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
    record_files,
    require_files,
    write_receipt,
)
from posttrain.errors import CheckpointError


def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_store(tmp_path / "killed"), make_store(tmp_path / "undisturbed")
    folder, receipt = store.folder("rollout_fp8"), part_receipt_of(store.folder("rollout_fp8"), 0)
    points = range(1, 13)
    endings = run_killed(
        "quantize_rollout_fp8",
        [*store.part("rollout_fp8", 0), "--threads", 2],
        tmp_path,
        [*points, 10**9],
        claim=(partial_of(folder), receipt),
    )
    assert endings.count(-9) >= 8
    assert endings[-1] == 0
    make_rollout_fp8(undisturbed)
    expected = read_receipt(part_receipt_of(undisturbed.folder("rollout_fp8"), 0))
    assert require_files(partial_of(folder), receipt, content=True) == expected
    assert sorted(p.name for p in partial_of(folder).iterdir()) == [record.path for record in expected.files]


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    store = make_store(tmp_path)
    shard = store.source / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = torch.inf
    save_file(tensors, shard, metadata={"format": "pt"})
    write_receipt(receipt_of(store.source), Receipt("patch_hf_config", record_files(store.source), {}, {}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight: holds NaN or inf"):
        run_here("quantize_rollout_fp8", store.part("rollout_fp8", 0))
    assert not part_receipt_of(store.folder("rollout_fp8"), 0).exists()

import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_store import make_quantized_store, make_store, run_here
from tests.support.killing import run_killed
from tests.support.rejections import rejected

from posttrain.store import (
    Receipt,
    part_receipt_of,
    partial_of,
    read_receipt,
    receipt_of,
    record_files,
    require_files,
    write_receipt,
)


@pytest.mark.parametrize(
    ("name", "part", "step"),
    [
        ("rollout_fp8", 0, "quantize_rollout_fp8"),
        ("export_fp8", 1, "quantize_export_fp8"),
        ("serving", 1, "quantize_serving"),
        ("bf16", 0, "cast_to_bf16"),
    ],
)
def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path, name, part, step):
    make = make_quantized_store if name == "bf16" else make_store
    store, undisturbed = make(tmp_path / "killed"), make(tmp_path / "undisturbed")
    folder, receipt = store.folder(name), part_receipt_of(store.folder(name), part)
    points = sorted(random.Random(6).sample(range(1, 13), 8))
    endings = run_killed(
        "quantize",
        [*store.part(name, part), "--threads", 2],
        tmp_path,
        [*points, 10**9],
        claim=(partial_of(folder), receipt),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    run_here("quantize", undisturbed.part(name, part))
    expected = read_receipt(part_receipt_of(undisturbed.folder(name), part))
    assert expected.step == step
    assert require_files(partial_of(folder), receipt, content=True) == expected
    assert sorted(p.name for p in partial_of(folder).iterdir()) == [record.path for record in expected.files]


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    store = make_store(tmp_path)
    shard = store.source / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = torch.inf
    save_file(tensors, shard, metadata={"format": "pt"})
    write_receipt(receipt_of(store.source), Receipt("patch_hf_config", record_files(store.source), {}, {}))
    with rejected("values-not-finite", "model.layers.0.self_attn.o_proj.weight"):
        run_here("quantize", store.part("rollout_fp8", 0))
    assert not part_receipt_of(store.folder("rollout_fp8"), 0).exists()


def test_a_source_in_bf16_is_not_cast(tmp_path):
    with rejected("not-quantized"):
        run_here("quantize", make_store(tmp_path).part("bf16", 0))

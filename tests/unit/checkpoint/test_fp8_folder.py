import dataclasses
import json
import shutil

import pytest
import torch
from posttrain.checkpoint.fp8_folder import finalize_folder, plan_shards, write_part
from posttrain.checkpoint.fp8_report import measure, summarize
from tests.tiny_checkpoint import TINY, make_random_checkpoint, random_tensors, write_shards

from posttrain.artifacts import part_receipt_of, partial_of
from posttrain.checkpoint.fp8 import dequantize_block, is_quantized, quantize_named
from posttrain.checkpoint.parts import read_parts, write_part_receipt
from posttrain.checkpoint.safetensors_io import CheckpointReader
from posttrain.errors import CheckpointError

# Wider than a block, and not a whole number of blocks.
ARCH = dataclasses.replace(TINY, intermediate_size=160, hidden_size=136)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(folder, ARCH)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def quantize(source, folder, num_parts=2, num_threads=1):
    receipts = [part_receipt_of(folder, part) for part in range(num_parts)]
    inputs = {"hf_patched": "s1"}
    for part, receipt in enumerate(receipts):
        made = write_part(source, "s1", folder, part, num_parts, num_threads)
        write_part_receipt(receipt, "quantize_rollout_fp8", part, num_parts, made, inputs, started=0.0)
    parts = read_parts(folder, receipts, "quantize_rollout_fp8", inputs)
    records = finalize_folder(source, partial_of(folder), parts)
    return partial_of(folder), records


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder_holds_what_weight_sync_would_send_byte_by_byte(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    origin, served = CheckpointReader(source), CheckpointReader(folder)
    expected = {name: tensor for hf in origin for name, tensor in quantize_named(hf, origin.tensor(hf))}
    assert served.names == list(expected)
    for name, tensor in expected.items():
        stored = served.tensor(name)
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_a_weight_lies_in_one_file_with_its_scale(tmp_path, source):
    served = CheckpointReader(quantize(source, tmp_path / "fp8")[0])
    scales = [name for name in served if name.endswith("_scale_inv")]
    assert len(scales) == sum(is_quantized(n, i.shape) for n, i in CheckpointReader(source).infos.items()) > 50
    assert all(served.file_of(name) == served.file_of(name.removesuffix("_scale_inv")) for name in scales)


def test_index_and_config_are_complete(tmp_path, source):
    folder, records = quantize(source, tmp_path / "fp8")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    reader = CheckpointReader(folder)
    assert index["metadata"]["total_size"] == reader.total_bytes
    assert len(reader.index.files) >= len(CheckpointReader(source).index.files) == 3
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["weight_block_size"] == [128, 128]
    assert "scale_fmt" not in quantization
    stays = {name for name, info in reader.infos.items() if info.dtype == "BF16" and len(info.shape) == 2}
    assert {f"{module}.weight" for module in quantization["modules_to_not_convert"]} == stays
    assert {record.path for record in records} == {path.name for path in folder.iterdir()}
    assert "tokenizer.json" in {record.path for record in records}


def test_the_bytes_are_the_same_for_any_number_of_parts_and_threads(tmp_path, source):
    reference, records = quantize(source, tmp_path / "a", num_parts=1)
    for num_parts, num_threads in ((2, 3), (5, 2)):
        folder, other = quantize(source, tmp_path / f"b{num_parts}", num_parts, num_threads)
        assert contents(folder) == contents(reference)
        assert sorted(other, key=str) == sorted(records, key=str)


def test_the_report_is_measured_on_what_is_served(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    report = json.loads((folder / "quantization_report.json").read_text())
    assert set(report) == {"all", "attention", "indexer", "dense_mlp", "experts", "shared_experts"}
    origin, served = CheckpointReader(source), CheckpointReader(folder)
    squares = errors = 0.0
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        weight = origin.tensor(name).double()
        error = dequantize_block(served.tensor(name), served.tensor(f"{name}_scale_inv")).double() - weight
        squares += weight.square().sum().item()
        errors += error.square().sum().item()
    row = report["dense_mlp"]
    assert row["relative_error"] == pytest.approx((errors / squares) ** 0.5, rel=1e-6)
    assert 0.015 < row["relative_error"] < 0.04
    assert (row["num_tensors"], row["num_elements"], row["num_saturated"]) == (3, 3 * 160 * 136, 0)
    assert row["bytes_after"] == 3 * (160 * 136 + 4 * 4)
    assert row["compression"] == pytest.approx(2 * 160 * 136 / (160 * 136 + 16))


def test_saturation_is_counted():
    weight, codes = torch.tensor([[500.0, 448.0, 463.0]]), torch.full((1, 3), 448.0).to(torch.float8_e4m3fn)
    error = measure(weight, codes, torch.ones(1, 1))
    assert error.num_saturated == 1
    assert error.max_abs_error == 52.0
    row = summarize({"model.layers.0.mlp.up_proj.weight": error})["dense_mlp"]
    assert row["relative_error"] == pytest.approx(((52**2 + 15**2) / (500**2 + 448**2 + 463**2)) ** 0.5)


def test_shards_follow_from_names_and_sizes_alone(source):
    plan = plan_shards(CheckpointReader(source))
    assert [name for held in plan.values() for name in held] == CheckpointReader(source).names


# ---- what is refused ----


def test_a_quantised_source_is_refused(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="quantised already"):
        write_part(folder, "s1", tmp_path / "again", 0, 1)


def test_a_source_with_codes_but_without_a_word_in_its_config_is_refused(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    shutil.copy(source / "config.json", folder / "config.json")
    with pytest.raises(CheckpointError, match=r"quantised already \(model\..*: F8_E4M3"):
        write_part(folder, "s1", tmp_path / "again", 0, 1)


def test_a_source_without_anything_on_the_list_is_refused(tmp_path):
    write_shards(tmp_path, {"transformer.h.0.attn.weight": torch.zeros(4, 4)}, 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        write_part(tmp_path, "s1", tmp_path / "fp8", 0, 1)


def test_fp32_weights_are_quantised_like_any(tmp_path):
    tensors = {name: tensor.float() for name, tensor in random_tensors(ARCH, seed=0).items()}
    write_shards(tmp_path, tensors, 2)
    (tmp_path / "config.json").write_text("{}")
    served = CheckpointReader(quantize(tmp_path, tmp_path / "fp8")[0])
    name = "model.layers.0.mlp.up_proj.weight"
    for served_name, expected in quantize_named(name, tensors[name]):
        assert torch.equal(served.tensor(served_name).float(), expected.float())


def test_a_weight_that_is_not_finite_is_refused_by_name_and_leaves_no_shard(tmp_path, source):
    broken = tmp_path / "hf"
    shutil.copytree(source, broken)
    tensors = random_tensors(ARCH, seed=0)
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][1, 1] = torch.nan
    write_shards(broken, tensors, 3)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight: holds NaN"):
        write_part(broken, "s1", tmp_path / "fp8", 0, 1)
    assert not any(path.name.endswith(".tmp") for path in partial_of(tmp_path / "fp8").iterdir())


def test_a_missing_part_is_refused(tmp_path, source):
    quantize(source, tmp_path / "fp8", num_parts=2)
    parts = read_parts(
        tmp_path / "fp8",
        [part_receipt_of(tmp_path / "fp8", p) for p in range(2)],
        "quantize_rollout_fp8",
        {"hf_patched": "s1"},
    )
    parts.popitem()
    with pytest.raises(CheckpointError, match="the source gives"):
        finalize_folder(source, partial_of(tmp_path / "fp8"), parts)


def test_transformers_loads_the_folder(tmp_path):
    """Its FP8 reader, told to dequantise: each weight is code * scale, and only the MTP layer is left over.

    That reader takes the size of a block from weight and scale, so it knows no smaller blocks at the edges.
    """
    from transformers import FineGrainedFP8Config
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM

    make_random_checkpoint(tmp_path / "hf", dataclasses.replace(TINY, hidden_size=128, intermediate_size=256))
    folder, _ = quantize(tmp_path / "hf", tmp_path / "fp8")
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
        dtype=torch.float32,
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])
    loaded, served = model.state_dict(), CheckpointReader(folder)
    for name, place in (
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.1.self_attn.indexer.wq_b.weight", "model.layers.1.self_attn.indexer.wq_b.weight"),
        ("model.layers.2.mlp.experts.3.down_proj.weight", "model.layers.2.mlp.experts.down_proj"),
    ):
        weight = loaded[place][3] if "experts" in name else loaded[place]
        expected = dequantize_block(served.tensor(name), served.tensor(f"{name}_scale_inv"))
        assert torch.equal(weight, expected), name

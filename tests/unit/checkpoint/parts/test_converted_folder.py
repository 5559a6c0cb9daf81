import argparse
import dataclasses
import json
import shutil

import pytest
import torch
from tests.support.folders_in_parts import INPUTS, make_folder
from tests.support.quantised import quantised
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, make_random_checkpoint, random_tensors, write_shards

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.parts import converted_folder
from posttrain.checkpoint.parts.converted_folder import RecodedFolder, plan_shards
from posttrain.checkpoint.parts.steps import join_parts, write_part_receipt
from posttrain.checkpoint.quantization.fp8 import Fp8Format, dequantize_block, quantize_named
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.checkpoint.quantization.quantized_names import Selection
from posttrain.store import part_receipt_of, partial_of, receipt_of

# Wider than a block, and not a whole number of blocks.
ARCH = dataclasses.replace(TINY, intermediate_size=160, hidden_size=136)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(folder, ARCH)
    (folder / "tokenizer.json").write_text("{}")
    return folder


BLOCKS = {"format": "fp8", "strategy": "block", "scale": "fp32"}
ALL = Selection()


def quantize(source, folder, num_parts=2, num_threads=1, **settings):
    making = RecodedFolder(Quantization(source, BLOCKS | settings), "s1")
    return folder, make_folder(making, folder, num_parts, num_threads).files


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


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
@pytest.mark.parametrize("settings", [{}, {"keep_last_layers": 1, "keep_modules": ["indexer"]}], ids=["all", "kept"])
def test_weight_sync_sends_the_bytes_of_the_folder(tmp_path, source, strategy, settings):
    folder, _ = quantize(source, tmp_path / "fp8", strategy=strategy, **settings)
    origin, stored = CheckpointReader(source), CheckpointReader(folder)
    served = Fp8Format(strategy, selection=Selection(num_layers=3, **settings))
    sent = quantised({name: origin.tensor(name) for name in origin}, served)
    assert sent.keys() == set(stored.names)
    for name, tensor in sent.items():
        assert stored.tensor(name).reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    kept = [name for name in stored if "indexer.wk.weight" in name or name.startswith("model.layers.2.mlp.experts")]
    assert all(stored.dtype(name) == "BF16" for name in kept) == bool(settings)


def test_a_weight_lies_in_one_file_with_its_scale(tmp_path, source):
    served = CheckpointReader(quantize(source, tmp_path / "fp8")[0])
    scales = [name for name in served if name.endswith("_scale_inv")]
    assert len(scales) == sum(ALL.includes(n, i.shape) for n, i in CheckpointReader(source).infos.items()) > 50
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


def test_shards_follow_from_names_and_sizes_alone(source):
    plan = plan_shards(Quantization(source, BLOCKS))
    assert [name for held in plan.values() for name in held] == CheckpointReader(source).names


def test_scales_of_experts_reach_over_the_borders_of_shards(tmp_path, monkeypatch):
    make_random_checkpoint(tmp_path / "hf")
    folders = [quantize(tmp_path / "hf", tmp_path / "few", format="nvfp4")[0]]
    monkeypatch.setattr(converted_folder, "MAX_SHARD_BYTES", 1)  # a file for each tensor
    folders.append(quantize(tmp_path / "hf", tmp_path / "many", format="nvfp4")[0])
    readers = [CheckpointReader(folder) for folder in folders]
    names = [name for name in readers[0] if name.endswith("up_proj.weight_scale_2")]
    pairs = [(name, name.replace("up_proj", "gate_proj")) for name in names]
    assert all(readers[1].file_of(up) != readers[1].file_of(gate) for up, gate in pairs)
    for name in readers[0]:
        first, second = (reader.tensor(name).reshape(-1).view(torch.uint8) for reader in readers)
        assert torch.equal(first, second), name
    assert all(torch.equal(readers[0].tensor(up), readers[0].tensor(gate)) for up, gate in pairs)


def test_the_nvfp4_folder_says_what_is_in_four_bits(tmp_path):
    make_random_checkpoint(tmp_path / "hf")
    folder, records = quantize(tmp_path / "hf", tmp_path / "nvfp4", format="nvfp4")
    stored = CheckpointReader(folder)
    quantized = [name for name in stored if stored.dtype(name) == "U8"]
    assert len(quantized) == 2 * TINY.n_routed_experts * 3
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    nested = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "NVFP4", 16)
    assert (nested["quant_algo"], nested["group_size"]) == ("NVFP4", 16)
    assert config["ignore"] == nested["exclude_modules"]
    assert {record.path for record in records} == {path.name for path in folder.iterdir()}


# ---- what is refused ----


def test_a_quantised_source_is_refused(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    with rejected("quantized-twice"):
        Quantization(folder, BLOCKS)


def test_a_source_with_codes_but_without_a_word_in_its_config_is_refused(tmp_path, source):
    folder, _ = quantize(source, tmp_path / "fp8")
    shutil.copy(source / "config.json", folder / "config.json")
    with rejected("quantized-twice", "F8_E4M3"):
        Quantization(folder, BLOCKS)


def test_a_source_without_anything_on_the_list_is_refused(tmp_path):
    write_shards(tmp_path, {"transformer.h.0.attn.weight": torch.zeros(4, 4)}, 1)
    (tmp_path / "config.json").write_text("{}")
    with rejected("nothing-to-quantize"):
        Quantization(tmp_path, BLOCKS)


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
    named = "-of-00003.safetensors: model.layers.2.mlp.experts.3.up_proj.weight: "
    with rejected("values-not-finite", named):
        RecodedFolder(Quantization(broken, BLOCKS), "s1").make(0, 1, tmp_path / "fp8")
    assert not any(path.name.endswith(".tmp") for path in partial_of(tmp_path / "fp8").iterdir())


KEPT = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_its_precision_is_no_less_finite(tmp_path, source, name, bad):
    broken = tmp_path / "hf"
    shutil.copytree(source, broken)
    tensors = random_tensors(ARCH, seed=0)
    tensors[name].view(-1)[3] = bad
    write_shards(broken, tensors, 3)
    named = f"-of-00003.safetensors: {name}: 1 of {tensors[name].numel()} values"
    with rejected("values-not-finite", named):
        RecodedFolder(Quantization(broken, BLOCKS), "s1").make(0, 1, tmp_path / "fp8")


def test_a_matrix_without_elements_is_refused_by_name(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    write_shards(tmp_path, {name: torch.zeros(0, 8).bfloat16(), "lm_head.weight": torch.ones(8, 8).bfloat16()}, 1)
    (tmp_path / "config.json").write_text("{}")
    with rejected("tensor-empty", f"{name}: BF16 [0, 8]"):
        Quantization(tmp_path, BLOCKS)


def test_a_shard_that_no_part_has_made_is_named(tmp_path, source):
    making = RecodedFolder(Quantization(source, BLOCKS), "s1")
    made = making.make(0, 2, tmp_path / "fp8")
    receipt = part_receipt_of(tmp_path / "fp8", 0)
    write_part_receipt(receipt, "quantize_rollout_fp8", made, INPUTS, {"part": 0, "num_parts": 1}, started=0.0)
    args = argparse.Namespace(folder=tmp_path / "fp8", receipt=receipt_of(tmp_path / "fp8"), part_receipts=[receipt])
    with rejected("parts-do-not-fit", ".safetensors"):
        join_parts("finalize_rollout_fp8", "quantize_rollout_fp8", args, INPUTS, making)
    assert not (tmp_path / "fp8").exists()


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

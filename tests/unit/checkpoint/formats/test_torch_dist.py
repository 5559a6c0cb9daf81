import dataclasses
import json

import pytest
import torch
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import (
    ALL,
    TINY,
    TINY_QWEN3,
    make_random_checkpoint,
    random_tensors,
    write_shards,
)

from posttrain.checkpoint.formats.torch_dist import (
    Conversion,
    planned_metadata,
    split_placements,
    verify_torch_dist,
)
from posttrain.checkpoint.formats.torch_dist_format import read_metadata
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.param_names import by_key, optional_copies, to_megatron
from posttrain.errors import CheckpointError
from posttrain.store import part_receipt_of, partial_of


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_random_checkpoint(folder)
    return folder


def convert(source, folder, arch=TINY, num_parts=2, num_threads=1, max_file_bytes=10**9):
    """Write all parts and the format's files; returns the folder that holds them."""
    make_folder(Conversion(source, "s1", arch, max_file_bytes), folder, num_parts, num_threads)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("arch", ALL.values(), ids=ALL)
def test_every_tensor_is_there_and_equal(tmp_path, arch):
    tensors = random_tensors(arch, seed=3)
    write_shards(tmp_path, tensors, 3)
    folder = convert(tmp_path, tmp_path / "torch_dist", arch)
    assert TorchDistReader(folder).keys == sorted(by_key(arch))
    assert verify_torch_dist(tmp_path, folder, arch) == len(tensors)
    # Before there is a folder, it is known what will be in it.
    planned, written = planned_metadata(arch), read_metadata(folder)
    assert planned.state_dict_metadata == written.state_dict_metadata
    assert planned.storage_data.keys() == written.storage_data.keys()


def test_experts_are_stacked_with_gate_above_up(tmp_path):
    tensors = random_tensors(TINY, seed=3)
    write_shards(tmp_path, tensors, 3)
    reader = TorchDistReader(convert(tmp_path, tmp_path / "torch_dist"))
    expert_2 = reader.read("decoder.layers.1.mlp.experts.experts.linear_fc1.weight")[2]
    gate, up = (tensors[f"model.layers.1.mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(expert_2, torch.cat([gate, up]))
    bias = reader.read("decoder.layers.2.mlp.router.expert_bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["model.layers.2.mlp.gate.e_score_correction_bias"])


def test_queries_keys_and_values_lie_group_by_group(tmp_path):
    """Two groups of four query heads, 16 rows each: q0-q3 k0 v0 q4-q7 k1 v1."""
    tensors = random_tensors(TINY_QWEN3, seed=3)
    write_shards(tmp_path, tensors, 2)
    reader = TorchDistReader(convert(tmp_path, tmp_path / "torch_dist", TINY_QWEN3))
    fused = reader.read("decoder.layers.1.self_attention.linear_qkv.weight")
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(fused, torch.cat([q[:64], k[:16], v[:16], q[64:], k[16:], v[16:]]))


def test_values_survive_bit_by_bit(tmp_path):
    """Negative zeros, subnormal numbers and the largest ones are data like any other."""
    tensors = random_tensors(TINY, seed=0)
    odd = torch.tensor([0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0xFF7F], dtype=torch.uint16)
    tensors["lm_head.weight"].view(torch.uint16)[0, :6] = odd
    write_shards(tmp_path, tensors, 2)
    folder = convert(tmp_path, tmp_path / "torch_dist")
    assert verify_torch_dist(tmp_path, folder, TINY) == len(tensors)
    stored = TorchDistReader(folder).read("output_layer.weight")
    assert torch.equal(stored.view(torch.uint16)[0, :6], odd)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused(tmp_path, value):
    tensors = random_tensors(TINY, seed=0)
    tensors["lm_head.weight"][1, 2:4] = value
    write_shards(tmp_path, tensors, 2)
    with rejected("values-not-finite", "safetensors: lm_head.weight: 2 of "):
        convert(tmp_path, tmp_path / "torch_dist")


def test_copies_in_the_mtp_layer_do_not_disturb(tmp_path):
    tensors = random_tensors(TINY, seed=0)
    tensors |= {copy: tensors[original].clone() for copy, original in optional_copies(TINY).items()}
    write_shards(tmp_path, tensors, 3)
    assert verify_torch_dist(tmp_path, convert(tmp_path, tmp_path / "t"), TINY) == len(tensors) - 2


def test_the_bytes_do_not_depend_on_threads_or_repetition(tmp_path, source):
    once = contents(convert(source, tmp_path / "a", num_parts=3, num_threads=1, max_file_bytes=50_000))
    again = contents(convert(source, tmp_path / "b", num_parts=3, num_threads=4, max_file_bytes=50_000))
    assert once == again
    assert len([name for name in once if name.endswith(".distcp")]) > 6


@pytest.mark.parametrize("num_parts", [1, 2, 5, 500])
def test_parts_are_balanced_and_hold_everything_once(num_parts):
    parts = split_placements(TINY, num_parts)
    assert [placement for part in parts for placement in part] == list(to_megatron(TINY))
    sizes = [sum(placement.size_bytes for placement in part) for part in parts]
    largest = max(placement.size_bytes for placement in to_megatron(TINY))
    assert max(sizes) <= sum(sizes) / num_parts + largest


def test_more_parts_than_tensors_still_make_the_model(tmp_path, source):
    folder = convert(source, tmp_path / "torch_dist", num_parts=120)
    assert verify_torch_dist(source, folder, TINY, num_threads=4) == len(to_megatron(TINY))


def test_another_number_of_parts_replaces_the_files(tmp_path, source):
    convert(source, tmp_path / "torch_dist", num_parts=3)
    folder = convert(source, tmp_path / "torch_dist", num_parts=2)
    assert verify_torch_dist(source, folder, TINY) == len(to_megatron(TINY))


def test_the_format_files_are_what_megatron_asks_for(tmp_path, source):
    folder = convert(source, tmp_path / "torch_dist")
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert torch.load(folder / "common.pt", weights_only=True) == {"content_metadata": {"non_homogeneous_layers": True}}


# ---- what is refused ----


def test_a_source_of_another_architecture_is_refused_with_all_differences(tmp_path):
    tensors = random_tensors(TINY, seed=0)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    tensors["model.layers.0.surprise.weight"] = torch.zeros(2).bfloat16()
    write_shards(tmp_path, tensors, 2)
    with pytest.raises(CheckpointError) as error:
        Conversion(tmp_path, "s1", TINY).make(0, 1, tmp_path / "torch_dist")
    for line in (
        "model.norm.weight: missing, expected BF16 [64]",
        "lm_head.weight: BF16 [63, 64], expected BF16 [64, 64]",
        "model.layers.0.surprise.weight: unknown",
    ):
        assert line in str(error.value)
    assert not partial_of(tmp_path / "torch_dist").exists()


def test_a_part_that_is_missing_is_named_by_its_tensors(tmp_path, source):
    folder = tmp_path / "torch_dist"
    making = Conversion(source, "s1", TINY)
    made = making.make(0, 2, folder)
    parts = {item.record.path: item for item in made}
    with rejected("parts-incomplete", "output_layer.weight"):
        making.complete(partial_of(folder), parts)
    assert not (partial_of(folder) / ".metadata").exists()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda chunks: chunks.pop(3), ""),
        (lambda chunks: chunks.append(chunks[0]), "embedding.word_embeddings.weight: 2 chunks"),
        (lambda chunks: chunks[0].update(global_shape=[1, 2]), "[64, 64]"),
        (lambda chunks: chunks[0].update(key="stranger"), "stranger: "),
    ],
)
def test_chunks_that_do_not_make_up_the_model_are_refused(tmp_path, source, change, found):
    folder = tmp_path / "torch_dist"
    making = Conversion(source, "s1", TINY)
    made = making.make(0, 1, folder)
    notes = json.loads(json.dumps(made[0].notes))
    change(notes["chunks"])
    parts = {made[0].record.path: dataclasses.replace(made[0], notes=notes)}
    with rejected("parts-incomplete", found):
        making.complete(partial_of(folder), parts)


def test_verify_names_the_key_of_a_flipped_byte(tmp_path, source):
    folder = convert(source, tmp_path / "torch_dist")
    tensors = random_tensors(TINY, seed=0)
    wanted = tensors["model.layers.2.mlp.experts.1.down_proj.weight"].view(torch.uint8).numpy().tobytes()
    path = next(path for path in folder.glob("*.distcp") if wanted in path.read_bytes())
    raw = bytearray(path.read_bytes())
    raw[raw.index(wanted) + 7] ^= 1
    path.write_bytes(raw)
    with rejected("conversion-differs", "decoder.layers.2.mlp.experts.experts.linear_fc2.weight") as error:
        verify_torch_dist(source, folder, TINY)
    assert path.name in str(error.value)
    assert "in 1 tensors" in str(error.value)


def test_verify_names_a_tensor_that_differs_although_its_chunk_is_sound(tmp_path, source):
    folder = convert(source, tmp_path / "torch_dist")
    other = tmp_path / "other"
    other.mkdir()
    tensors = random_tensors(TINY, seed=0)
    tensors["model.norm.weight"].view(torch.int16)[5] ^= 1
    write_shards(other, tensors, 3)
    with rejected("conversion-differs", "decoder.final_layernorm.weight at [0]", "model.norm"):
        verify_torch_dist(other, folder, TINY)


# ---- resuming ----


def test_only_a_broken_file_is_written_again(tmp_path, source):
    folder = convert(source, tmp_path / "torch_dist", num_parts=1, max_file_bytes=100_000)
    before = contents(folder)
    broken, kept = sorted(folder.glob("*.distcp"))[:2]
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    time_before = kept.stat().st_mtime_ns
    part_receipt_of(folder, 0).unlink()
    convert(source, tmp_path / "torch_dist", num_parts=1, max_file_bytes=100_000)
    assert contents(folder) == before
    assert kept.stat().st_mtime_ns == time_before

import json
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec, read_header
from posttrain.checkpoint.formats.shard_writer import (
    HashingFile,
    assign_shards,
    shard_name,
    split_evenly,
    write_index,
    write_shard,
)
from posttrain.store import hash_file

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


def specs_of(tensors):
    return {name: TensorSpec(tuple(t.shape), DTYPE_NAMES[t.dtype]) for name, t in tensors.items()}


def write(path, tensors):
    with open(path, "wb") as opened, HashingFile(opened) as file:
        write_shard(file, specs_of(tensors), tensors.__getitem__)
    return file


def test_shards_are_filled_in_order():
    assert assign_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
    assert assign_shards({}, 8) == {}
    assert shard_name(99, 1000) == "model-00100-of-01000.safetensors"


def test_parts_are_cut_where_their_share_ends():
    assert split_evenly([1, 1, 2, 4], 2) == [range(3), range(3, 4)]
    assert split_evenly([5], 3) == [range(0), range(1), range(1, 1)]
    assert split_evenly([], 2) == [range(0), range(0)]


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_parts_hold_everything_once_and_none_is_far_from_its_share(sizes, num_parts):
    parts = split_evenly(sizes, num_parts)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    for part in parts:
        share = sum(sizes[i] for i in part)
        assert abs(share - sum(sizes) / num_parts) <= max(sizes, default=0)


def test_the_file_is_the_one_that_safetensors_writes(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2).bfloat16()}
    file = write(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert file.size_bytes == (tmp_path / "ours.safetensors").stat().st_size
    assert file.xxh3_128 == hash_file(tmp_path / "ours.safetensors")


def test_odd_sizes_leave_every_tensor_aligned_and_readable(tmp_path):
    tensors = {
        "codes": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(5).bfloat16(),
        "packed": torch.arange(7, dtype=torch.uint8),
        "scale": torch.randn(2, 1),
        "transposed": torch.randn(4, 3).t(),
        "empty": torch.empty(0, 4),
    }
    write(tmp_path / "model.safetensors", tensors)
    for name, info in read_header(tmp_path / "model.safetensors").items():
        assert info.start % tensors[name].element_size() == 0
    reader, library = CheckpointReader(tmp_path), load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name).float(), tensor.float())
        assert torch.equal(library[name].float(), tensor.float())


def test_a_tensor_that_is_not_as_announced_is_a_defect(tmp_path):
    with (
        open(tmp_path / "x", "wb") as opened,
        pytest.raises(AssertionError, match="announced as F32"),
    ):
        write_shard(HashingFile(opened), {"a": TensorSpec((2,), "F32")}, lambda name: torch.zeros(3))


@pytest.mark.parametrize(("length", "order"), [(2, ["half", "a", "b"]), (3, ["a", "b", "half"])])
def test_one_tensor_is_read_at_a_time_and_the_order_given_stays_unless_it_misaligns(tmp_path, length, order):
    tensors = {"half": torch.zeros(length).bfloat16(), "a": torch.zeros(2), "b": torch.zeros(2)}
    asked = []
    with open(tmp_path / "x", "wb") as opened, HashingFile(opened) as file:
        write_shard(file, specs_of(tensors), lambda name: asked.append(name) or tensors[name])
    assert asked == order
    assert list(read_header(tmp_path / "x")) == asked


def test_total_size_is_bytes_not_rows(tmp_path):
    specs = {"a": TensorSpec((3, 5), "F32"), "b": TensorSpec((7,), "BF16"), "c": TensorSpec((), "F32")}
    write_index(tmp_path, {"b": "y", "a": "x", "c": "y"}, specs)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 60 + 14 + 4
    assert list(index["weight_map"]) == ["b", "a", "c"]


def test_a_full_disk_is_told_and_not_what_torch_makes_of_it(tmp_path):
    """torch.save ends with an error of its own about positions in the file; the caller needs the system's."""

    def save(path):
        with open(path, "wb") as opened, HashingFile(opened) as file:
            torch.save(torch.zeros(100_000), file)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(tmp_path / "file")

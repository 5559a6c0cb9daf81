import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import write_shards

from posttrain.checkpoint.formats.safetensors_io import (
    CheckpointReader,
    TensorSpec,
    read_header,
    read_index,
    read_metadata,
)


def write_raw(path, rows, data, metadata=None):
    """Write a safetensors file by hand: rows are name -> (dtype, shape, start, end)."""
    header = {"__metadata__": metadata} if metadata else {}
    header |= {n: {"dtype": d, "shape": s, "data_offsets": [a, b]} for n, (d, s, a, b) in rows.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return 8 + len(text)


@pytest.fixture
def folder(tmp_path):
    """Two shards: `a` [4, 3] BF16 and `b` [5] FP32 in the first, `c` [2, 2, 2] BF16 in the second."""
    tensors = {
        "a": torch.arange(12).reshape(4, 3).bfloat16(),
        "b": torch.arange(5).float(),
        "c": torch.arange(8).reshape(2, 2, 2).bfloat16(),
    }
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": tensors["a"], "b": tensors["b"]}, tmp_path / first)
    save_file({"c": tensors["c"]}, tmp_path / second)
    weight_map = {"c": second, "a": first, "b": first}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


# ---- headers ----


def test_positions_count_from_the_beginning_of_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    rows = {"second": ("BF16", [2, 3], 4, 16), "first": ("F32", [], 0, 4)}
    start = write_raw(path, rows, bytes(range(16)), metadata={"format": "pt"})
    infos = read_header(path)
    assert list(infos) == ["first", "second"]
    assert (infos["second"].start, infos["second"].end) == (start + 4, start + 16)
    assert infos["second"].spec == TensorSpec((2, 3), "BF16")
    assert infos["first"].size_bytes == 4
    assert path.read_bytes()[infos["second"].start] == 4
    assert read_metadata(path) == {"format": "pt"}


@pytest.mark.parametrize(
    ("keep", "code"), [(0, "shard-empty"), (5, "shard-truncated"), (20, "shard-truncated"), (-1, "shard-truncated")]
)
def test_a_truncated_file_is_named_with_both_sizes(folder, keep, code):
    path = folder / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:keep])
    with rejected(code, path) as error:
        read_header(path)
    assert str(keep % size) in str(error.value)
    if keep == -1:
        assert str(size) in str(error.value)


@pytest.mark.parametrize(
    ("rows", "length", "code", "found"),
    [
        ({"a": ("F32", [2], 0, 8), "b": ("F32", [1], 4, 8)}, 8, "shard-offsets", "tensor b"),
        ({"a": ("F32", [1], 0, 4), "b": ("F32", [1], 8, 12)}, 12, "shard-offsets", "tensor b"),
        ({"a": ("F32", [1], 0, 4)}, 6, "shard-too-long", "x.safetensors"),
        ({"a": ("F32", [3], 0, 8)}, 8, "shard-header", "tensor a has 8 bytes, F32 [3] needs 12"),
        ({"a": ("F31", [3], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [-1], 0, -4)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [float("inf")], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [2.5], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", ["2"], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [True, 2], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [2**63], 0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [2**62] * 64, 0, 8)}, 8, "shard-header", "tensor a has 8 bytes"),
        ({"a": ("F32", [1] * 65, 0, 4)}, 4, "shard-header", "tensor a "),
        ({"a": ("F32", [2], 0.0, 8)}, 8, "shard-header", "tensor a "),
        ({"a": ("F32", [2], -8, 0)}, 8, "shard-header", "tensor a "),
        ({"a\x1b[2J": ("F32", [2], 0, 8)}, 8, "tensor-name", r"'a\x1b[2J'"),
        ({"a\nb": ("F32", [2], 0, 8)}, 8, "tensor-name", r"'a\nb'"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, rows, length, code, found):
    path = tmp_path / "x.safetensors"
    write_raw(path, rows, bytes(length))
    with rejected(code, found, path):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "code", "found"),
    [
        (b"\x04\0\0\0\0\0\0\0oops", "shard-header", "JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "shard-header", "list"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "shard-header", "nested too deeply"),
        (b"<!DOCTYPE html><html>", "placeholder", "HTML"),
    ],
)
def test_something_else_than_safetensors_is_refused(tmp_path, content, code, found):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with rejected(code, found):
        read_header(path)


# ---- folders ----


def test_reads_by_index_in_its_order(folder):
    reader = CheckpointReader(folder)
    assert reader.names == list(reader) == ["c", "a", "b"]
    assert len(reader) == 3
    assert "a" in reader
    assert "d" not in reader
    assert reader.shape("c") == (2, 2, 2)
    assert reader.dtype("b") == "F32"
    assert reader.total_bytes == 24 + 20 + 16
    assert reader.file_of("c") == "model-00002-of-00002.safetensors"
    assert torch.equal(reader.tensor("b"), torch.tensor([0.0, 1, 2, 3, 4]))
    assert torch.equal(reader.rows("a", 1, 3), torch.tensor([[3, 4, 5], [6, 7, 8]]).bfloat16())
    assert reader.rows("b", 2, 2).shape == (0,)


def test_a_single_file_needs_no_index(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert torch.equal(CheckpointReader(tmp_path).tensor("a"), torch.ones(3))
    assert read_index(tmp_path).metadata["total_size"] == 12


def test_threads_read_the_same(tmp_path):
    tensors = {f"t{i}": torch.full((50, 7), float(i)) for i in range(40)}
    write_shards(tmp_path, tensors, 3)
    reader = CheckpointReader(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        read = dict(zip(tensors, pool.map(reader.tensor, tensors), strict=True))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_every_absent_or_broken_file_is_named_at_once(folder):
    first, second = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with rejected("shards-incomplete") as error:
        CheckpointReader(folder)
    assert f"{first}: no such file" in str(error.value)
    assert f"{second}: truncated" in str(error.value)


def test_every_tensor_that_the_index_misplaces_is_named(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = "model-00002-of-00002.safetensors"
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with rejected("index-wrong") as error:
        CheckpointReader(folder)
    assert "a is not in model-00002-of-00002.safetensors" in str(error.value)
    assert "ghost is not in model-00001-of-00002.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("index", "code", "found"),
    [
        ("{", "index-invalid", ""),
        ("[]", "index-invalid", ""),
        ('{"weights": {}}', "index-invalid", "weight_map"),
        ('{"weight_map": ["a"]}', "index-invalid", "weight_map"),
        ('{"weight_map": {"a": 3}}', "name-leaves-folder", "int"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "name-leaves-folder", "'../secret.safetensors'"),
    ],
)
def test_something_else_than_an_index_is_refused(tmp_path, index, code, found):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with rejected(code, "index.json", found):
        CheckpointReader(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with rejected("no-shards"):
        CheckpointReader(tmp_path)


def test_an_unknown_tensor_is_refused(folder):
    with rejected("no-such-tensor", "no tensor d"):
        CheckpointReader(folder).tensor("d")


def test_headers_and_names_need_no_torch():
    program = (
        "import sys, posttrain.checkpoint.formats.safetensors_io, posttrain.checkpoint.param_names;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["a\0b", "a" * 256, "é" * 128, "a\nb", "a\x1b[2J", "", ".."])
def test_an_index_names_files_that_can_be(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with rejected("name-leaves-folder") as refused:
        CheckpointReader(tmp_path)
    assert name.isprintable() or name not in str(refused.value)


def test_an_index_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":' * 100_000)
    with rejected("index-invalid", "index.json", "nested too deeply"):
        CheckpointReader(tmp_path)


def test_tensors_that_the_index_does_not_name_are_refused(folder):
    CheckpointReader(folder).require_all_named()
    index = folder / "model.safetensors.index.json"
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": {"c": second, "a": first}}))
    with rejected("index-incomplete", "1 tensors", f"\n  b in {first}\n"):
        CheckpointReader(folder).require_all_named()
    save_file({"c": torch.ones(1), "a": torch.zeros(4, 3)}, folder / second)
    index.write_text(json.dumps({"weight_map": {"c": second, "a": first, "b": first}}))
    with rejected("index-incomplete", f"a in {second}"):
        CheckpointReader(folder).require_all_named()

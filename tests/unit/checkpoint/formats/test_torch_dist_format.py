"""The pickles of a `torch_dist` checkpoint: only what the format needs gets through."""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path

import pytest
import torch
from tests.support.payload import Payload
from tests.support.rejections import rejected
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from posttrain.checkpoint.formats.torch_dist_format import METADATA_NAME, read_common, read_metadata
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that torch itself wrote."""
    folder = tmp_path / "checkpoint"
    torch_save({"matrix": torch.ones(6, 4), "step": 7}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def edit_metadata(folder: Path, edit) -> None:
    metadata = read_metadata(folder)
    edit(metadata)
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def place_of(metadata, key="matrix"):
    return next(place for index, place in metadata.storage_data.items() if index.fqn == key)


def test_what_torch_wrote_is_read(folder):
    metadata = read_metadata(folder)
    assert metadata.state_dict_metadata["matrix"].size == (6, 4)
    assert {index.fqn for index in metadata.storage_data} == {"matrix", "step"}


@pytest.mark.parametrize(
    "reduce",
    [lambda one, _: (getattr, (type(one), one.name)), lambda one, _: (type(one), (one.value,))],
    ids=["python 3.11.0 to 3.11.3", "others"],
)
def test_what_another_python_wrote_is_read(tmp_path, monkeypatch, reduce):
    """They differ in how they pickle the member of an enumeration, and a store may be older than an environment."""
    with monkeypatch.context() as other:
        other.setattr(enum.Enum, "__reduce_ex__", reduce)
        torch_save({"matrix": torch.ones(6, 4)}, storage_writer=FileSystemWriter(tmp_path / "it"), no_dist=True)
    properties = read_metadata(tmp_path / "it").state_dict_metadata["matrix"].properties
    assert properties.memory_format is torch.contiguous_format


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (7, "real")],
)
def test_nothing_but_members_of_enumerations_is_an_attribute(tmp_path, kind, name):
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(Attribute(kind, name)))
    with rejected("metadata-invalid", name):
        read_metadata(tmp_path)


class Attribute:
    """What an unpickler asks `getattr` for."""

    def __init__(self, kind: object, name: str):
        self._words = kind, name

    def __reduce__(self):
        return getattr, self._words


def test_a_pickle_that_runs_code_is_refused_by_what_it_names(tmp_path):
    payload = Payload(tmp_path / "ran")
    (tmp_path / METADATA_NAME).write_bytes(payload.content)
    torch.save(payload, tmp_path / "common.pt")
    for read in (read_metadata, TorchDistReader):
        with rejected("metadata-invalid", ".metadata", "posix.mkdir"):
            read(tmp_path)
    with rejected("metadata-invalid", "common.pt", "GLOBAL posix.mkdir"):
        read_common(tmp_path)
    assert not payload.has_run


@pytest.mark.parametrize("content", [{"a": 1}, [io.StringIO], 7], ids=["dict", "class", "number"])
def test_metadata_that_is_something_else_is_refused(tmp_path, content):
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(content))
    with rejected("metadata-invalid"):
        read_metadata(tmp_path)


def test_metadata_that_is_cut_off_anywhere_is_refused(folder):
    raw = (folder / METADATA_NAME).read_bytes()
    for length in range(0, len(raw), 7):
        (folder / METADATA_NAME).write_bytes(raw[:length])
        with rejected("metadata-invalid"):
            read_metadata(folder)


def test_metadata_with_a_byte_changed_is_read_or_refused(folder):
    """Nothing but a refusal comes out, whatever the bytes mean to the unpickler."""
    raw, refused = (folder / METADATA_NAME).read_bytes(), 0
    for position in range(0, len(raw), 3):
        (folder / METADATA_NAME).write_bytes(raw[:position] + bytes([raw[position] ^ 0xFF]) + raw[position + 1 :])
        try:
            TorchDistReader(folder).keys  # noqa: B018
        except CheckpointError:
            refused += 1
    assert refused > len(raw) / 6


def test_a_folder_without_metadata_is_refused(tmp_path):
    with rejected("metadata-missing", METADATA_NAME):
        read_metadata(tmp_path)
    with rejected("metadata-missing", "common.pt"):
        read_common(tmp_path)


@pytest.mark.parametrize("name", ["../../shadow", "/etc/shadow", "a//b"])
def test_a_chunk_outside_the_folder_is_refused(folder, name):
    edit_metadata(folder, lambda metadata: setattr(place_of(metadata), "relative_path", name))
    with rejected("name-leaves-folder", f"'{name}'"):
        read_metadata(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("size", (6.0, 4)), ("size", (6, -4)), ("size", (6,)), ("size", (True, 4))]
)
def test_a_tensor_of_no_shape_is_refused(folder, field, value):
    edit_metadata(folder, lambda metadata: setattr(metadata.state_dict_metadata["matrix"], field, value))
    with rejected("metadata-invalid", "tensor matrix"):
        read_metadata(folder)


@pytest.mark.parametrize("name", ["offsets", "sizes"])
@pytest.mark.parametrize("value", [(0,), (0, -1), "ab", (0, 0, 0)])
def test_a_chunk_of_no_shape_is_refused(folder, name, value):
    def edit(metadata):
        (chunk,) = metadata.state_dict_metadata["matrix"].chunks
        setattr(chunk, name, value)

    edit_metadata(folder, edit)
    with rejected("metadata-invalid", "tensor matrix"):
        read_metadata(folder)


@pytest.mark.parametrize(("field", "value"), [("offset", -1), ("length", 1.5), ("offset", "0")])
def test_a_chunk_at_no_place_is_refused(folder, field, value):
    edit_metadata(folder, lambda metadata: setattr(place_of(metadata), field, value))
    with rejected("metadata-invalid", "_StorageInfo"):
        read_metadata(folder)


def test_a_precision_that_is_none_is_refused(folder):
    edit_metadata(folder, lambda metadata: setattr(metadata.state_dict_metadata["matrix"].properties, "dtype", 3))
    with rejected("metadata-invalid", "tensor matrix"):
        read_metadata(folder)


@pytest.mark.parametrize("raw", [b"", b"junk", pickle.dumps({"step": 1}), b"PK\x03\x04"])
def test_wrong_bytes_are_no_common_state(tmp_path, raw):
    (tmp_path / "common.pt").write_bytes(raw)
    with rejected("metadata-invalid", "common.pt"):
        read_common(tmp_path)

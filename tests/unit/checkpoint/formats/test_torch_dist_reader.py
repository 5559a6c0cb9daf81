import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rejections import rejected
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.errors import CheckpointError


@pytest.fixture(scope="module")
def values():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(6, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5),
    }


@pytest.fixture
def folder(tmp_path, values):
    """A checkpoint that torch itself wrote."""
    torch_save({**values, "step": 7}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def test_reads_what_torch_wrote(folder, values):
    reader = TorchDistReader(folder)
    assert reader.keys == sorted(values)
    assert "step" not in reader
    reader.check_files()
    for key, value in values.items():
        assert reader.shape(key) == tuple(value.shape)
        assert reader.dtype(key) == value.dtype
        assert torch.equal(reader.read(key), value)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_box_is_put_together_from_any_chunks(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("boxes")
    whole = torch.arange(5 * 7).reshape(5, 7)
    row_cuts = data.draw(st.lists(st.integers(1, 4), max_size=3))
    column_cuts = data.draw(st.lists(st.integers(1, 6), max_size=3))
    write_in_chunks(folder, whole, row_cuts, column_cuts)
    offsets = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 6)))
    sizes = data.draw(st.tuples(st.integers(1, 5 - offsets[0]), st.integers(1, 7 - offsets[1])))
    rows, columns = (slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
    assert torch.equal(TorchDistReader(folder).read("t", offsets, sizes), whole[rows, columns])


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_come_piece_by_piece_as_the_chunks_are_cut(tmp_path, axis):
    whole = torch.arange(5 * 7).reshape(5, 7)
    write_in_chunks(tmp_path, whole, [2], [3, 5])
    pieces = list(TorchDistReader(tmp_path).read_rows("t", (1, 1), (4, 5), axis))
    assert torch.equal(torch.cat(pieces, axis), whole[1:5, 1:6])
    assert [piece.shape[axis] for piece in pieces] == [[1, 3], [2, 2, 1]][axis]


def write_in_chunks(folder, whole, row_cuts, column_cuts, leave_out=()):
    """Write a matrix in a grid of chunks, each in a file of its own."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    starts = [sorted({0, *cuts}) for cuts in (row_cuts, column_cuts)]
    chunks, places = [], {}
    for top, bottom in zip(starts[0], [*starts[0][1:], whole.shape[0]], strict=True):
        for left, right in zip(starts[1], [*starts[1][1:], whole.shape[1]], strict=True):
            offset, part = torch.Size((top, left)), whole[top:bottom, left:right].clone()
            if (top, left) in leave_out:
                continue
            name = f"__{len(chunks)}_0.distcp"
            torch.save(part, folder / name)
            places[MetadataIndex("t", offset)] = _StorageInfo(name, 0, (folder / name).stat().st_size)
            chunks.append(ChunkStorageMetadata(offset, part.size()))
    tensors = {"t": TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), chunks)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))


def test_only_the_chunks_that_are_needed_are_read(tmp_path):
    whole = torch.arange(16).reshape(4, 4)
    write_in_chunks(tmp_path, whole, [2], [2])
    for other in ("__1_0.distcp", "__2_0.distcp", "__3_0.distcp"):
        (tmp_path / other).unlink()
    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read("t", (1, 1), (1, 1)), whole[1:2, 1:2])
    with rejected("file-missing", "__1_0.distcp"):
        reader.read("t", (1, 1), (1, 2))


def test_a_part_that_no_chunk_holds_is_refused(tmp_path):
    write_in_chunks(tmp_path, torch.zeros(4, 4), [2], [2], leave_out={(2, 2)})
    with rejected("chunks-incomplete", "12 of 16 elements"):
        TorchDistReader(tmp_path).read("t")


def test_an_unknown_key_is_refused(folder):
    with rejected("no-such-tensor", "other"):
        TorchDistReader(folder).shape("other")


# ---- damage ----


def only_file(folder):
    return next(folder.glob("*.distcp"))


def test_a_truncated_file_is_found_without_reading_it(folder, values):
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:-200])
    reader = TorchDistReader(folder)
    with rejected("chunks-incomplete") as error:
        reader.check_files()
    assert str(path) in str(error.value)
    failures = []
    for key in values:
        try:
            reader.read(key)
        except CheckpointError as found:
            failures.append((key, str(found)))
    assert failures
    assert all(str(path) in text and key in text for key, text in failures)


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_the_data_is_found(folder, values, bit):
    path = only_file(folder)
    raw = bytearray(path.read_bytes())
    position = raw.index(values["matrix"].numpy().tobytes()) + 10
    raw[position] ^= 1 << bit
    path.write_bytes(raw)
    with rejected("chunk-corrupt", "matrix") as error:
        TorchDistReader(folder).read("matrix")
    assert str(path) in str(error.value)
    assert torch.equal(TorchDistReader(folder).read("half"), values["half"])


def test_a_flipped_byte_anywhere_never_gives_other_values(folder, values):
    path = only_file(folder)
    raw = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for position in torch.randint(len(raw), (150,), generator=generator).tolist():
        broken = bytearray(raw)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        reader = TorchDistReader(folder)
        for key, value in values.items():
            read = read_or_none(reader, key)
            assert read is None or torch.equal(read, value)
            refused += read is None
    assert refused > 20


def read_or_none(reader, key):
    try:
        return reader.read(key)
    except CheckpointError:
        return None

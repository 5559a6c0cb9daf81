"""Reads Megatron's distributed checkpoints (`torch_dist`) without Megatron, a model or a process group.

The folder holds `.metadata` (which chunk of which tensor lies where), `*.distcp` (the chunks, each as
torch.save writes it) and `common.pt` (everything that is not a tensor). It may be a converted checkpoint or
one that a training run wrote in any layout. A tensor, or any box of it, is put together from the chunks
that it meets; no other chunk is read.

`.metadata` is a pickle. A pickle can run code, so only the classes of the format are let through.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from posttrain.checkpoint.tiling import Box, Shape, intersect, slices_within
from posttrain.errors import CheckpointError

METADATA_NAME = ".metadata"
_FORMAT = "torch.distributed.checkpoint."
_FORMAT_CLASSES = {
    f"{_FORMAT}metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_FORMAT}planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_FORMAT}filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class TorchDistReader:
    """Reader of a `torch_dist` folder. Safe to use from several threads.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: When there is no readable `.metadata`.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        metadata = _load_metadata(self.folder / METADATA_NAME)
        storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        self._places = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
        self._tensors = {
            key: row for key, row in metadata.state_dict_metadata.items() if isinstance(row, TensorStorageMetadata)
        }
        self._boxes = {
            key: {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in row.chunks}
            for key, row in self._tensors.items()
        }

    @property
    def keys(self) -> list[str]:
        """All tensors, sorted; objects that are no tensors are not among them."""
        return sorted(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> Shape:
        """Return the dimensions of a tensor."""
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the precision that a tensor is stored in."""
        return self._tensor(key).properties.dtype

    def chunks(self, key: str) -> list[Box]:
        """Return the boxes that a tensor is stored in."""
        self._tensor(key)
        return list(self._boxes[key].items())

    def chunks_by_file(self) -> dict[str, list[tuple[str, Box]]]:
        """Return file name -> (tensor, box) of every chunk that lies in it."""
        found: dict[str, list[tuple[str, Box]]] = {}
        for (key, offsets), info in self._places.items():
            if key in self._boxes:
                found.setdefault(info.relative_path, []).append((key, (offsets, self._boxes[key][offsets])))
        return found

    def read(self, key: str, offsets: Shape | None = None, sizes: Shape | None = None) -> torch.Tensor:
        """Read a tensor, or a box of it.

        Args:
            key: Name of the tensor.
            offsets: First index in each dimension; by default all zero.
            sizes: Extent in each dimension; by default up to the end.

        Returns:
            A new tensor of shape `sizes` in the stored precision.

        Raises:
            CheckpointError: When the tensor, a part of the box or a file is missing, or a chunk is corrupt.
        """
        shape = self.shape(key)
        offsets = offsets or (0,) * len(shape)
        sizes = sizes or tuple(n - a for n, a in zip(shape, offsets, strict=True))
        if self._boxes[key].get(offsets) == sizes:
            return self._read_chunk(key, (offsets, sizes))
        return self._assemble(key, (offsets, sizes))

    def check_files(self) -> None:
        """Check that every file is there and long enough for its chunks; no chunk is read.

        Raises:
            CheckpointError: Listing the files that are not.
        """
        needed: dict[str, int] = {}
        for info in self._places.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        wrong = []
        for name, size in sorted(needed.items()):
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < size:
                wrong.append(f"{path}: {'missing' if found is None else f'{found} bytes'}, at least {size} needed")
        if wrong:
            raise CheckpointError(f"{self.folder}: not complete:\n  " + "\n  ".join(wrong))

    def _tensor(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError(f"{self.folder}: no tensor {key}")
        return self._tensors[key]

    def _assemble(self, key: str, wanted: Box) -> torch.Tensor:
        result = torch.empty(wanted[1], dtype=self.dtype(key))
        filled = 0
        for box in self.chunks(key):
            if shared := intersect(box, wanted):
                chunk = self._read_chunk(key, box)
                result[slices_within(shared, wanted)] = chunk[slices_within(shared, box)]
                filled += math.prod(shared[1])
        if filled != result.numel():
            raise CheckpointError(
                f"{self.folder}: {key} at {wanted[0]} of size {wanted[1]}: the chunks hold {filled} of "
                f"{result.numel()} elements"
            )
        return result

    def _read_chunk(self, key: str, box: Box) -> torch.Tensor:
        if (key, box[0]) not in self._places:
            raise CheckpointError(f"{self.folder}: {METADATA_NAME} does not say where {key} at {box[0]} lies")
        info = self._places[key, box[0]]
        path = self.folder / info.relative_path
        tensor = _load_tensor(_read_bytes(path, info, key), path, key)
        if tuple(tensor.shape) != box[1] or tensor.dtype != self.dtype(key):
            raise CheckpointError(
                f"{path}: {key} at {box[0]}: {tensor.dtype} {list(tensor.shape)} found, "
                f"{self.dtype(key)} {list(box[1])} expected"
            )
        return tensor


def _read_bytes(path: Path, info: _StorageInfo, key: str) -> bytes:
    """Read one chunk's bytes; several threads may read one file."""
    try:
        with open(path, "rb") as file:
            file.seek(info.offset)
            raw = file.read(info.length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; it holds {key}") from error
    if len(raw) != info.length:
        size, end = path.stat().st_size, info.offset + info.length
        raise CheckpointError(f"{path}: truncated: {size} bytes, {key} ends at {end}")
    return raw


def _load_tensor(raw: bytes, path: Path, key: str) -> torch.Tensor:
    """Decode a chunk, after comparing the checksums in it: torch.load does not look at them."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            broken = archive.testzip()
        if broken is None:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt: {key} cannot be decoded ({error})") from error
    raise CheckpointError(f"{path}: corrupt: the checksum of {key} does not fit its bytes")


def _load_metadata(path: Path) -> Metadata:
    try:
        with open(path, "rb") as file:
            metadata = _FormatUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; not a torch_dist checkpoint") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: not the metadata of a torch_dist checkpoint ({error})") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


class _FormatUnpickler(pickle.Unpickler):
    """Unpickles nothing but the classes of torch's checkpoint format."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the format.

        Raises:
            UnpicklingError: For anything else.
        """
        if name in _FORMAT_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")

"""Reads the pickled parts of a `torch_dist` checkpoint without executing code in them.

`.metadata` (the place of each chunk) and `common.pt` (non-tensor state) are pickles, which can run code. Megatron's and
torch's own readers run it. Here only the format's classes are unpickled, and a checkpoint is loaded from the result:
the file is not opened again.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from posttrain.errors import CheckpointError, reason_of
from posttrain.store import RelativeName

METADATA_NAME, COMMON_NAME = ".metadata", "common.pt"
# Megatron 0.19 and later write this object into the shards instead.
COMMON_KEY = "common_state/shard_0_1"
# Exceptions of an unpickler for invalid bytes; torch passes most of them on.
WRONG_PICKLE = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
_FORMAT = "torch.distributed.checkpoint."
FORMAT_CLASSES = {
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


def read_metadata(folder: Path) -> Metadata:
    """Read the place of each tensor's chunks.

    Args:
        folder: A `torch_dist` checkpoint.

    Returns:
        Metadata whose tensors, chunks and places have the format's types; no place is outside the folder.

    Raises:
        CheckpointError: The file is missing, or not the metadata of a `torch_dist` checkpoint.
    """
    path = folder / METADATA_NAME
    try:
        with open(path, "rb") as file:
            metadata = FormatUnpickler(file).load()
        wrong = next(_misfits(metadata), "")
    except FileNotFoundError as error:
        raise CheckpointError("metadata-missing", f"{path}: no such file; not a torch_dist checkpoint") from error
    except WRONG_PICKLE as error:
        raise CheckpointError(
            "metadata-invalid", f"{path}: not the metadata of a torch_dist checkpoint ({reason_of(error)})"
        ) from error
    if wrong:
        raise CheckpointError("metadata-invalid", f"{path}: not the metadata of a torch_dist checkpoint ({wrong})")
    for place in metadata.storage_data.values():
        RelativeName(place.relative_path, path)
    return metadata


def read_common(folder: Path) -> dict[str, Any]:
    """Read the non-tensor state.

    Raises:
        CheckpointError: The file is missing, or has objects other than numbers, texts and their containers.
    """
    path = folder / COMMON_NAME
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError("metadata-missing", f"{path}: no such file; not a checkpoint of Megatron") from error
    except (RuntimeError, *WRONG_PICKLE) as error:
        raise CheckpointError("metadata-invalid", f"{path}: cannot be read ({reason_of(error)})") from error
    if not isinstance(common, dict):
        raise CheckpointError("metadata-invalid", f"{path}: holds a {type(common).__name__}, expected a dictionary")
    return common


def _misfits(metadata: Any) -> Iterator[str]:
    """Yield values of other types than the format's: a pickle may set a class's fields to anything."""
    if not isinstance(metadata, Metadata):
        yield f"a {type(metadata).__name__}"
        return
    for key, row in metadata.state_dict_metadata.items():
        if isinstance(row, TensorStorageMetadata) and not _is_tensor(row):
            yield f"tensor {key} is described as {row!r:.200}"
    for index, place in metadata.storage_data.items():
        if not _is_place(index, place):
            yield f"{index!r:.200} lies at {place!r:.200}"


def _is_tensor(row: TensorStorageMetadata) -> bool:
    boxes = [row.size, *(box for chunk in row.chunks for box in (chunk.offsets, chunk.sizes))]
    return isinstance(row.properties.dtype, torch.dtype) and all(_is_shape(box, len(row.size)) for box in boxes)


def _is_place(index: Any, place: Any) -> bool:
    if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
        return False
    offset = () if index.offset is None else index.offset
    return _is_shape(offset, len(offset)) and _is_shape((place.offset, place.length), 2)


def _is_shape(numbers: Any, count: int) -> bool:
    is_whole = isinstance(numbers, tuple) and all(type(number) is int and number >= 0 for number in numbers)
    return is_whole and len(numbers) == count


class FormatUnpickler(pickle.Unpickler):
    """Unpickles only the classes of torch's checkpoint format."""

    CLASSES: Mapping[str, Set[str]] = FORMAT_CLASSES

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the format.

        Raises:
            UnpicklingError: For anything else.
        """
        if name in self.CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as an attribute of its class.
            return _member_of
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def _member_of(kind: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration; reject any other attribute."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"{name!r:.100} of {kind!r:.100} has no place in it")
    return kind.__members__[name]

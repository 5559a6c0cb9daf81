"""Reads checkpoints in Hub layout: safetensors shards, their headers and their index.

A safetensors file is 8 bytes (little-endian length of the header), a JSON header, and the tensors' bytes in sequence.
The header alone shows whether the file is complete, so a truncated shard is found without reading its data and without
torch. Tensors are read lazily: a slice needs only the slice's memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from posttrain.errors import CheckpointError
from posttrain.store import parse_json, read_json
from posttrain.store.names import RelativeName
from posttrain.store.placeholders import placeholder

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Bytes per element of every supported dtype, in the format's spelling.
DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
_BUFFER = ".rotary_emb.inv_freq"
# A file begins with the length of its header, 64 bits.
_LENGTH_BYTES = 8
# The format's own limit; a larger number means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000
# torch's limits of the number of dimensions and of their sizes.
_MAX_DIMENSIONS, _MAX_SIZE = 64, 2**63


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Args:
        shape: Its dimensions; () for a scalar.
        dtype: In the format's spelling, a key of `DTYPE_BYTES`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor in a safetensors file.

    Args:
        name: Name in the checkpoint.
        dtype: In the format's spelling, a key of `DTYPE_BYTES`.
        shape: Its dimensions; () for a scalar.
        start: Offset of the first byte in the file.
        end: Offset after the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        return self.end - self.start

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return TensorSpec(self.shape, self.dtype)


# ---- one file ----


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file and check it against the file.

    Args:
        path: A `.safetensors` file.

    Returns:
        Name -> description, in the order of the data in the file.

    Raises:
        CheckpointError: The file is truncated, too long, not safetensors, or its tensors overlap or leave a gap; the
            message has the file and both sizes.
    """
    size, header_bytes, header = _read_raw_header(path)
    data_start = _LENGTH_BYTES + header_bytes
    rows = {name: row for name, row in header.items() if name != "__metadata__"}
    infos = [_parse_row(path, name, row, data_start) for name, row in rows.items()]
    infos.sort(key=lambda info: (info.start, info.end))
    end = data_start
    for info in infos:
        if info.start != end:
            relation = "overlaps the tensor before it" if info.start < end else "leaves a gap before it"
            raise CheckpointError(
                "shard-offsets", f"{path}: tensor {info.name} at byte {info.start} {relation}, which ends at {end}"
            )
        end = info.end
    sizes = f"{size} bytes on disk, {end} according to its header"
    if size < end:
        raise CheckpointError("shard-truncated", f"{path}: truncated: {sizes}; download or copy it again")
    if size > end:
        raise CheckpointError("shard-too-long", f"{path}: has bytes that no tensor owns: {sizes}")
    return {info.name: info for info in infos}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the free-form `__metadata__` of a safetensors file; {} without any."""
    _, _, header = _read_raw_header(path)
    return dict(header.get("__metadata__") or {})


def _read_raw_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the file's size, the header's length and the header; reads only the bytes before the data."""
    size = _size_of(path)
    if instead := placeholder(path):
        raise CheckpointError("placeholder", f"{path}: {instead}")
    if not size:
        raise CheckpointError("shard-empty", f"{path}: empty; download or copy it again")
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size >= _LENGTH_BYTES and header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(
                "not-safetensors", f"{path}: not safetensors: its first 8 bytes are no header's length"
            )
        if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
            needed = _LENGTH_BYTES + (header_bytes if size >= _LENGTH_BYTES else 0)
            raise CheckpointError(
                "shard-truncated",
                f"{path}: truncated: {size} bytes on disk, the header alone needs {needed}; download or copy it again",
            )
        text = file.read(header_bytes)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise CheckpointError("shard-header", f"{path}: corrupt: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(
            "shard-header", f"{path}: corrupt: its header is a {type(header).__name__}, not an object"
        )
    return size, header_bytes, header


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError("file-missing", f"{path}: no such file") from error


def _parse_row(path: Path, name: str, row: Any, data_start: int) -> TensorInfo:
    if not name.isprintable():
        raise CheckpointError(
            "tensor-name", f"{path}: corrupt: a tensor's name has unprintable characters: {name!r:.200}"
        )
    try:
        dtype, shape, (start, end) = str(row["dtype"]), tuple(row["shape"]), row["data_offsets"]
        expected = math.prod(_counts(shape)) * DTYPE_BYTES[dtype]
        _counts((start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "shard-header", f"{path}: corrupt: tensor {name} described as {row!r:.200} ({error!r})"
        ) from error
    if end - start != expected:
        raise CheckpointError(
            "shard-header",
            f"{path}: corrupt: tensor {name} has {end - start} bytes, {dtype} {list(shape)} needs {expected}",
        )
    return TensorInfo(name, dtype, shape, data_start + start, data_start + end)


def _counts(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    if len(numbers) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers):
        raise ValueError("dimensions and positions are whole numbers from 0")
    return numbers


# ---- a folder ----


@dataclass(frozen=True)
class Index:
    """Maps tensors to files of a folder.

    Args:
        weight_map: Tensor name -> file name, in the index's own order.
        metadata: The index's `metadata` object; `total_size` is the bytes of all tensors.
    """

    weight_map: Mapping[str, RelativeName]
    metadata: Mapping[str, Any]

    @property
    def files(self) -> list[RelativeName]:
        """The files in the order of the index."""
        return list(dict.fromkeys(self.weight_map.values()))


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint in Hub layout; a folder with one `model.safetensors` needs none.

    Raises:
        CheckpointError: There is neither an index nor a `model.safetensors`, or the index is invalid.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return _index_of_single_file(folder)
    try:
        content = read_json(path)
        weight_map, metadata = content["weight_map"], content.get("metadata") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("index-invalid", f"{path}: not an index of safetensors shards ({error!r})") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError("index-invalid", f"{path}: `weight_map` must map each tensor's name to a file's name")
    files = {tensor: RelativeName(name, path) for tensor, name in weight_map.items() if not is_buffer(tensor)}
    return Index(files, metadata)


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer saved by old versions of transformers; models compute it from config.json.

    It is ignored, as in transformers and SGLang.
    """
    return name.endswith(_BUFFER)


def _index_of_single_file(folder: Path) -> Index:
    if not (folder / SINGLE_NAME).exists():
        raise CheckpointError(
            "no-shards", f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there; not a checkpoint"
        )
    header = {name: info for name, info in read_header(folder / SINGLE_NAME).items() if not is_buffer(name)}
    total = sum(info.size_bytes for info in header.values())
    return Index(dict.fromkeys(header, RelativeName(SINGLE_NAME)), {"total_size": total})


class CheckpointReader:
    """Lazy reader of a checkpoint in Hub layout: checks headers at once, and reads data on demand.

    Safe to use from several threads. A returned tensor may be a view of the mapped file: clone it before modifying it.

    Args:
        folder: Folder with shards and index, or with one `model.safetensors`.

    Raises:
        CheckpointError: Lists all missing or broken files, or all tensors that are missing in the file that the index
            names.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        headers = self._read_headers()
        places = self.index.weight_map.items()
        if absent := [f"{name} is not in {file}" for name, file in places if name not in headers[file]]:
            raise CheckpointError(
                "index-wrong", f"{self.folder}: the index is wrong:\n  " + "\n  ".join(_shorten(absent))
            )
        self._infos = {name: headers[file][name] for name, file in places}
        named = self.index.weight_map
        held = [(name, file) for file in headers for name in headers[file] if not is_buffer(name)]
        self._strays = [f"{name} in {file}" for name, file in held if named.get(name) != file]
        self._local = threading.local()

    def _read_headers(self) -> dict[str, dict[str, TensorInfo]]:
        headers: dict[str, dict[str, TensorInfo]] = {}
        found = []
        for file in self.index.files:
            try:
                headers[file] = read_header(self.folder / file)
            except CheckpointError as error:
                found.append(str(error))
        if found:
            raise CheckpointError(
                "shards-incomplete", f"{self.folder}: not complete:\n  " + "\n  ".join(_shorten(found))
            )
        return headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the index's order."""
        return list(self._infos)

    def require_all_named(self) -> None:
        """Reject a checkpoint whose files have tensors that its index omits: they would be lost silently.

        Raises:
            CheckpointError: Lists tensors in a shard that the index omits or assigns to another file.
        """
        if self._strays:
            listed = "\n  ".join(_shorten(self._strays))
            remedy = "name them in the index, or take a copy of the checkpoint without them"
            raise CheckpointError(
                "index-incomplete",
                f"{self.folder / INDEX_NAME}: does not name {len(self._strays)} tensors of its shards:\n  {listed}\n"
                f"  remedy: {remedy}",
            )

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Name -> dtype, shape and position of all tensors, in the index's order."""
        return self._infos

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.size_bytes for info in self._infos.values())

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and position of a tensor.

        Raises:
            CheckpointError: The checkpoint has no such tensor.
        """
        if name not in self._infos:
            raise CheckpointError("no-such-tensor", f"{self.folder}: no tensor {name}")
        return self._infos[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's dimensions."""
        return self.info(name).shape

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype in the format's spelling."""
        return self.info(name).dtype

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        self.info(name)
        return self.index.weight_map[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        return self._open(self.file_of(name)).get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the rows `start` to `stop` (exclusive) of a tensor; reads only these."""
        num_rows = self.shape(name)[0]
        assert 0 <= start <= stop <= num_rows, f"rows {start}:{stop} of {name}, which has {num_rows}"
        return self._open(self.file_of(name)).get_slice(name)[start:stop]

    def _open(self, file: str) -> Any:
        """Return this thread's handle of a file; opening maps the file and reads only its header."""
        handles = self._local.__dict__.setdefault("handles", {})
        if file not in handles:
            handles[file] = safe_open(self.folder / file, framework="pt")
        return handles[file]


def _shorten(lines: list[str], limit: int = 20) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"... and {len(lines) - limit} more"]

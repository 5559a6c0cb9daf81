"""Reads Megatron's distributed checkpoints (`torch_dist`) without Megatron, a model or a process group.

The folder has `.metadata` (the place of each chunk), `*.distcp` (the chunks, each written by torch.save) and, before
Megatron 0.19, `common.pt` (non-tensor state). It may be a converted checkpoint, or one that training wrote in any
layout. A tensor, or a box of it, is assembled from the overlapping chunks; no others are read. Chunks are mapped, so
reading costs only page cache.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from posttrain.checkpoint.formats.torch_dist_format import COMMON_KEY, METADATA_NAME, WRONG_PICKLE, read_metadata
from posttrain.checkpoint.quantization.tiling import Chunk, Shape, intersect, slices_within
from posttrain.errors import CheckpointError, reason_of

# Each keeps a file mapped; processes may have 1024 open files by default.
_OPEN_CHUNKS = 64
# Approximate size of one piece of a tensor.
_ROWS_BYTES = 64 << 20


class TorchDistReader:
    """Reader of a `torch_dist` folder. Safe to use from several threads.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: `.metadata` is missing or unreadable.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        metadata = read_metadata(self.folder)
        storage = metadata.storage_data
        self._places = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
        self._tensors = {
            key: row for key, row in metadata.state_dict_metadata.items() if isinstance(row, TensorStorageMetadata)
        }
        self._boxes = {
            key: sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in row.chunks)
            for key, row in self._tensors.items()
        }
        self._longest = {
            key: max((box[1][0] for box in boxes if box[1]), default=1) for key, boxes in self._boxes.items()
        }
        # Mapped chunks cost no memory, and a Hub tensor may be many boxes of one chunk.
        self._read_chunk = functools.lru_cache(maxsize=_OPEN_CHUNKS)(self._map_and_check)

    @property
    def keys(self) -> list[str]:
        """The names of all tensors, sorted; other objects are excluded."""
        return sorted(self._tensors)

    @property
    def holds_common_state(self) -> bool:
        """Whether non-tensor state is in the shards (Megatron 0.19 and later) instead of `common.pt`."""
        return any(key == COMMON_KEY for key, _ in self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> Shape:
        """Return the dimensions of a tensor."""
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's stored precision."""
        return self._tensor(key).properties.dtype

    def chunks(self, key: str) -> list[Chunk]:
        """Return a tensor's stored boxes."""
        self._tensor(key)
        return self._boxes[key]

    def chunks_by_file(self) -> dict[str, list[tuple[str, Chunk]]]:
        """Return file name -> (tensor, box) of every chunk in it."""
        found: dict[str, list[tuple[str, Chunk]]] = {}
        for key, boxes in self._boxes.items():
            for box in boxes:
                if info := self._places.get((key, box[0])):
                    found.setdefault(info.relative_path, []).append((key, box))
        return found

    def read(self, key: str, offsets: Shape | None = None, sizes: Shape | None = None) -> torch.Tensor:
        """Read a tensor, or a box of it.

        Args:
            key: Name of the tensor.
            offsets: First index in each dimension; by default all zero.
            sizes: Extent in each dimension; by default up to the end.

        Returns:
            A tensor of shape `sizes` in the stored precision. If the box is in one chunk, it is a view of the mapped
            file: clone it before modifying it.

        Raises:
            CheckpointError: The tensor, a part of the box or a file is missing, or a chunk is corrupt.
        """
        shape = self.shape(key)
        offsets = offsets or (0,) * len(shape)
        sizes = sizes or tuple(n - a for n, a in zip(shape, offsets, strict=True))
        wanted = offsets, sizes
        parts = self._overlaps(key, wanted)
        if len(parts) == 1 and parts[0][1] == wanted:
            box = parts[0][0]
            return self._read_chunk(key, box)[slices_within(wanted, box)]
        return self._assemble(key, wanted, parts)

    def read_rows(self, key: str, offsets: Shape, sizes: Shape, axis: int = 0) -> Iterator[torch.Tensor]:
        """Read a box in pieces of a few rows, along the chunks' edges.

        The pieces joined along `axis` equal the result of `read`, with one piece's memory.
        """
        first, end = offsets[axis], offsets[axis] + sizes[axis]
        edges = {first, end}
        for (low, extent), _ in self._overlaps(key, (offsets, sizes)):
            edges |= {max(first, low[axis]), min(end, low[axis] + extent[axis])}
        for start, stop in itertools.pairwise(sorted(edges)):
            part_offsets = (*offsets[:axis], start, *offsets[axis + 1 :])
            part_sizes = (*sizes[:axis], stop - start, *sizes[axis + 1 :])
            rows = self.read(key, part_offsets, part_sizes)
            yield from rows.split(max(1, _ROWS_BYTES * (stop - start) // max(1, rows.nbytes)), dim=axis)

    def check_files(self) -> None:
        """Check that every file exists and is long enough for its chunks; reads no chunk.

        Raises:
            CheckpointError: Lists missing or short files.
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
            raise CheckpointError("chunks-incomplete", f"{self.folder}: not complete:\n  " + "\n  ".join(wrong))

    def damaged_keys(self, file_name: str) -> list[str]:
        """Read every chunk of one file; return the tensors with an unreadable chunk, sorted."""
        damaged = set()
        for key, box in self.chunks_by_file().get(file_name, ()):
            try:
                self._read_chunk(key, box)
            except CheckpointError:
                damaged.add(key)
        return sorted(damaged)

    def _tensor(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise CheckpointError("no-such-tensor", f"{self.folder}: no tensor {key}")
        return self._tensors[key]

    def _overlaps(self, key: str, wanted: Chunk) -> list[tuple[Chunk, Chunk]]:
        """Return the chunks that overlap a box, each with the overlap; uses binary search."""
        boxes = self._boxes[key]
        if not wanted[0]:
            return [(box, wanted) for box in boxes]
        start, end = wanted[0][0], wanted[0][0] + wanted[1][0]
        low = bisect_left(boxes, ((start - self._longest[key] + 1,), ()))
        high = bisect_left(boxes, ((end,), ()))
        return [(box, shared) for box in boxes[low:high] if (shared := intersect(box, wanted))]

    def _assemble(self, key: str, wanted: Chunk, parts: Sequence[tuple[Chunk, Chunk]]) -> torch.Tensor:
        result = torch.empty(wanted[1], dtype=self.dtype(key))
        filled = 0
        for box, shared in parts:
            chunk = self._read_chunk(key, box)
            result[slices_within(shared, wanted)] = chunk[slices_within(shared, box)]
            filled += math.prod(shared[1])
        if filled != result.numel():
            raise CheckpointError(
                "chunks-incomplete",
                f"{self.folder}: {key} at {wanted[0]} of size {wanted[1]}: the chunks hold {filled} of "
                f"{result.numel()} elements",
            )
        return result

    def _map_and_check(self, key: str, box: Chunk) -> torch.Tensor:
        if (key, box[0]) not in self._places:
            raise CheckpointError(
                "chunk-not-listed", f"{self.folder}: {METADATA_NAME} does not say where {key} at {box[0]} lies"
            )
        info = self._places[key, box[0]]
        path = self.folder / info.relative_path
        tensor = _decode(_map_chunk(path, info, key), info.offset % mmap.ALLOCATIONGRANULARITY, path, key)
        if tuple(tensor.shape) != box[1] or tensor.dtype != self.dtype(key):
            raise CheckpointError(
                "chunk-shape",
                f"{path}: {key} at {box[0]}: {tensor.dtype} {list(tensor.shape)} found, "
                f"{self.dtype(key)} {list(box[1])} expected",
            )
        return tensor


class _Mapped(mmap.mmap):
    """A mapped part of a file that zipfile can read."""

    def seekable(self) -> bool:
        """Return True for zipfile; mmap itself has this method from Python 3.13 on."""
        return True


def _map_chunk(path: Path, info: _StorageInfo, key: str) -> _Mapped:
    """Map a chunk, including the bytes before it on its first page."""
    end = info.offset + info.length
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            if size < end:
                raise CheckpointError("file-truncated", f"{path}: truncated: {size} bytes, {key} ends at {end}")
            before = info.offset % mmap.ALLOCATIONGRANULARITY
            # A copy-on-write mapping, because torch rejects tensors on read-only memory.
            return _Mapped(file.fileno(), before + info.length, offset=info.offset - before, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise CheckpointError("file-missing", f"{path}: no such file; it holds {key}") from error


def _decode(mapped: _Mapped, start: int, path: Path, key: str) -> torch.Tensor:
    """Return the tensor of a mapped chunk after checking its checksums, which torch.load ignores."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], mapped)) as archive:
            broken = archive.testzip()
        if broken is None:
            mapped.seek(start)
            layout = torch.load(cast(IO[bytes], mapped), map_location="meta", weights_only=True)
            return _tensor_within(mapped, start, layout)
    except (zipfile.BadZipFile, RuntimeError, *WRONG_PICKLE) as error:
        raise CheckpointError(
            "chunk-corrupt", f"{path}: corrupt: {key} cannot be decoded ({reason_of(error)})"
        ) from error
    raise CheckpointError("chunk-corrupt", f"{path}: corrupt: the checksum of {key} does not fit its bytes")


def _tensor_within(mapped: _Mapped, start: int, layout: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `layout` describes, as a view of the mapped bytes."""
    described = layout.untyped_storage()
    if not described.nbytes():
        return torch.empty(layout.shape, dtype=layout.dtype)
    first = start + (described._checkpoint_offset or 0)
    stored = torch.frombuffer(mapped, dtype=torch.uint8, offset=first, count=described.nbytes())
    tensor = torch.empty(0, dtype=layout.dtype)
    return tensor.set_(stored.untyped_storage(), layout.storage_offset(), layout.shape, layout.stride())

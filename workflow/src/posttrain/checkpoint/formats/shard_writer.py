"""Writes checkpoints in Hub layout as streams: first the header, then one tensor in memory at a time.

Content and order of a shard depend only on names, shapes and dtypes. So independent jobs agree on a checkpoint's
shards, and a shard's bytes do not depend on the job that writes it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.formats.safetensors_io import DTYPE_BYTES, INDEX_NAME, TensorSpec
from posttrain.checkpoint.staging.file_placement import HashingFile
from posttrain.store import write_json

# The limit of huggingface_hub and transformers.
MAX_SHARD_BYTES = 5 * 10**9
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# The format pads its header so that the data's offset is a multiple of the widest element's size.
_HEADER_ALIGNMENT = 8


# ---- assignment to shards ----


def assign_shards(sizes: Mapping[str, int], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[str]]:
    """Fill shards in order; only a shard with a single tensor may exceed the limit.

    Args:
        sizes: Name -> bytes. Tensors that must stay together (a weight and its scale) are one entry.
        max_shard_bytes: Limit of a shard's data.

    Returns:
        File name -> names, in order.

    Example:
        Sizes a=4, b=4, c=9, d=1 with a limit of 8 give [a, b], [c], [d].
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return {shard_name(i, len(shards)): names for i, names in enumerate(shards)}


def shard_name(index: int, num_shards: int) -> str:
    """Return the Hub's name of shard `index`, counted from 0."""
    return f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Split a sequence into consecutive parts of about equal bytes; a part may be empty.

    An item belongs to the part that contains its middle byte, so a part differs from the mean by at most its largest
    item.

    Example:
        Sizes 1, 1, 2, 4 in two parts give range(0, 3) and range(3, 4).
    """
    total, seen, parts = max(1, sum(sizes)), 0, []
    for size in sizes:
        parts.append(min(num_parts - 1, (2 * seen + size) * num_parts // (2 * total)))
        seen += size
    return [range(bisect_left(parts, part), bisect_right(parts, part)) for part in range(num_parts)]


# ---- writing ----


def write_shard(
    file: HashingFile,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], torch.Tensor | Iterator[torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, one tensor at a time.

    Data has the given order; if a tensor would then not start at a multiple of its element size, which readers that map
    the file require, the widest dtype comes first.

    Args:
        file: The open file.
        specs: Name -> shape and dtype of the shard's tensors.
        read: Returns a tensor, or its rows in pieces; called once per name, in the order of the data.
        metadata: The file's `__metadata__`.
    """
    names = _data_order(specs)
    file.write(_header({name: specs[name] for name in names}, metadata or {"format": "pt"}))
    for name in names:
        value, spec, start = read(name), specs[name], file.size_bytes
        if isinstance(value, torch.Tensor):
            assert tuple(value.shape) == spec.shape, f"{name}: announced as {spec}, got {list(value.shape)}"
            value = iter([value])
        for piece in value:
            assert piece.dtype == TORCH_DTYPES[spec.dtype], f"{name}: announced as {spec}, got {piece.dtype}"
            file.write(tensor_bytes(piece))
        written = file.size_bytes - start
        assert written == spec.size_bytes, f"{name}: announced as {spec}, got {written} bytes"


def _data_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    start = 0
    for spec in specs.values():
        if start % DTYPE_BYTES[spec.dtype]:
            return sorted(specs, key=lambda name: -DTYPE_BYTES[specs[name].dtype])
        start += spec.size_bytes
    return list(specs)


def count_not_finite(tensor: torch.Tensor) -> int:
    """Return the number of NaN or infinite values; codes of one byte are not checked."""
    if tensor.itemsize == 1 or not tensor.numel():
        return 0
    # A single pass without a mask of the tensor's size: with a NaN, the extremes are NaN.
    if all(torch.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, spec in specs.items():
        end = start + spec.size_bytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(_HEADER_ALIGNMENT, "little") + text


def write_index(folder: Path, weight_map: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> None:
    """Write the index of a checkpoint; `total_size` is the actual number of bytes of its tensors.

    Args:
        folder: The checkpoint.
        weight_map: Tensor name -> file name, in the index's order.
        specs: Shape and dtype of each tensor.
    """
    total = sum(specs[name].size_bytes for name in weight_map)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(weight_map)})

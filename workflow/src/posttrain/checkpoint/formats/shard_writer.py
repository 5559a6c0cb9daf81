"""Writes checkpoints in Hub layout as streams: the header first, then one tensor in memory at a time.

What goes into a shard, and where, follows from names, shapes and dtypes alone. So jobs that know nothing of
each other agree on the shards of one checkpoint, and a shard has the same bytes whoever writes it.
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

# Where huggingface_hub and transformers cut shards, too.
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
# The format pads its header so that data begins at a multiple of the widest element.
_HEADER_ALIGNMENT = 8


# ---- who goes where ----


def assign_shards(sizes: Mapping[str, int], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[str]]:
    """Fill shards in order, none above the limit unless a single tensor is.

    Args:
        sizes: Name -> bytes. What must stay together (a weight and its scale) is one entry.
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
    """Cut a sequence into consecutive parts of about equal bytes; a part may be empty.

    An item belongs to the part in whose share of the bytes its middle lies, so no part is further from the
    mean than its largest item.

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

    The data lies in the given order, or, where a tensor would then not start at a multiple of its element size,
    which readers that map the file need, widest dtype first.

    Args:
        file: Where it goes.
        specs: Name -> shape and dtype of the shard's tensors.
        read: Returns a tensor, or its rows piece by piece; called once per name, in the order of the data.
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
    """Return how many values are NaN or infinite; codes of one byte are not looked at."""
    if tensor.itemsize == 1 or not tensor.numel():
        return 0
    # One pass without a mask as large as the tensor: NaN is the extreme of any tensor that has one.
    if all(torch.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy where it lies so already."""
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
    """Write the index of a checkpoint, with the true number of bytes of its tensors as `total_size`.

    Args:
        folder: The checkpoint.
        weight_map: Tensor name -> file name, in the index's order.
        specs: Shape and dtype of each tensor.
    """
    total = sum(specs[name].size_bytes for name in weight_map)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(weight_map)})

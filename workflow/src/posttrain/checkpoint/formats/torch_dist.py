"""Writes Megatron's distributed checkpoint (`torch_dist`) from the Hub's, in independent parts.

The format is `torch.distributed.checkpoint`'s: `*.distcp` files with one chunk after the other, each as
torch.save writes it, and `.metadata`, which says where each chunk of each tensor lies. `metadata.json` and
`common.pt` are Megatron's. Each Hub tensor becomes one chunk or a few (`param_names`), so a part needs neither a
model nor other parts: it copies its share of the tensors, notes where each went, and the last step joins
the notes to `.metadata`. Tensors are copied from the mapped source file: no tensor is ever held in memory.

Megatron loads the result in any layout; `TorchDistReader` reads it without Megatron.
"""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from posttrain.artifacts import write_atomic, write_json
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.shard_writer import (
    TORCH_DTYPES,
    HashingFile,
    assign_shards,
    count_not_finite,
    split_evenly,
    tensor_bytes,
)
from posttrain.checkpoint.formats.torch_dist_reader import METADATA_NAME, TorchDistReader
from posttrain.checkpoint.param_names import Placement, by_key, require_tensors, to_megatron
from posttrain.checkpoint.parts.parts import Description, Notes, OutputFile, make_files
from posttrain.checkpoint.quantization.tiling import Box, find_misfit
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError
from posttrain.observability.progress import ProgressBar

log = logging.getLogger(__name__)

# Small enough to lose little to a kill and to keep several threads busy, large enough for few files.
MAX_FILE_BYTES = 4 * 10**9
# What torch.save adds to the data of a chunk, about.
CHUNK_OVERHEAD_BYTES = 1600
# What Megatron's `dist_checkpointing` asks for before it reads anything else.
MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# What Megatron reads from `common.pt` before it asks a model for its names: each layer has its own.
COMMON_STATE = {"content_metadata": {"non_homogeneous_layers": True}}
FORMAT_FILES = (METADATA_NAME, "metadata.json", "common.pt")


# ---- a part ----


def write_part(
    source: Path,
    source_digest: str,
    folder: Path,
    arch: Architecture,
    part: int,
    num_parts: int,
    num_threads: int = 1,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Description]:
    """Write a part's share of the tensors as `__{part}_{n}.distcp`.

    Args:
        source: Checkpoint in Hub layout.
        source_digest: Digest of its receipt.
        folder: Final name of the `torch_dist` folder.
        arch: Dimensions of the model.
        part: Which share, from 0.
        num_parts: How many shares.
        num_threads: Files written at a time.
        max_file_bytes: Limit of a file's data.

    Returns:
        A description of each file; its notes list the chunks.

    Raises:
        CheckpointError: When the source's tensors are not those of the architecture, all differences at once.
    """
    reader = CheckpointReader(source)
    require_tensors(reader, arch)
    share = split_placements(arch, num_parts)[part]
    sizes = {placement.hf_name: placement.size_bytes for placement in share}
    by_name = {placement.hf_name: placement for placement in share}
    groups = [[by_name[name] for name in names] for names in assign_shards(sizes, max_file_bytes).values()]
    files = [_output_file(reader, source_digest, f"__{part}_{n}.distcp", group) for n, group in enumerate(groups)]
    return make_files(folder, files, f"convert part {part} of {num_parts}", num_threads)


def split_placements(arch: Architecture, num_parts: int) -> list[list[Placement]]:
    """Return each part's share: consecutive tensors of about equal bytes."""
    placements = to_megatron(arch)
    shares = split_evenly([placement.size_bytes for placement in placements], num_parts)
    return [[placements[i] for i in share] for share in shares]


def _output_file(
    reader: CheckpointReader, source_digest: str, name: str, placements: Sequence[Placement]
) -> OutputFile:
    chunks = [_chunk_row(placement, box) for placement in placements for box in placement.boxes]
    return OutputFile(
        name=name,
        size_bytes=sum(placement.size_bytes for placement in placements) + CHUNK_OVERHEAD_BYTES * len(chunks),
        made_from={"source": source_digest, "chunks": chunks},
        write=functools.partial(_write_chunks, reader, placements),
    )


def _chunk_row(placement: Placement, box: Box) -> dict[str, Any]:
    offsets, sizes = box
    return {
        "key": placement.key,
        "dtype": placement.dtype,
        "global_shape": list(placement.global_shape),
        "offsets": list(offsets),
        "sizes": list(sizes),
    }


def _write_chunks(reader: CheckpointReader, placements: Sequence[Placement], file: HashingFile) -> Notes:
    chunks = []
    for placement in placements:
        tensor = _require_finite(reader, placement.hf_name)
        for box, rows in placement.chunks:
            start = file.size_bytes
            torch.save(_with_own_storage(tensor[rows].reshape(box[1])), cast(BinaryIO, file))
            chunks.append({**_chunk_row(placement, box), "start": start, "length": file.size_bytes - start})
    return {"chunks": chunks}


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own: torch.save of a view would write the whole file behind it."""
    return torch.frombuffer(tensor_bytes(tensor), dtype=tensor.dtype).reshape(tensor.shape)


def _require_finite(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Return a tensor, or refuse it: trained on, one NaN would spread to all weights."""
    tensor = reader.tensor(name)
    if num_bad := count_not_finite(tensor):
        raise CheckpointError(
            f"{reader.folder / reader.file_of(name)}: {name}: {num_bad} of {tensor.numel()} values are NaN or "
            "infinite; get the file anew from its source, or another revision of the model"
        )
    return tensor


# ---- the last step ----


def write_format_files(folder: Path, parts: Mapping[str, Description], arch: Architecture) -> None:
    """Write what makes a folder of chunks a checkpoint.

    Args:
        folder: Holds the parts' files.
        parts: File name -> description, of all parts.
        arch: Dimensions of the model.

    Raises:
        CheckpointError: Listing every tensor that the chunks do not cover exactly once.
    """
    # Plain text: readers of the format unpickle nothing of ours.
    rows = [{**chunk, "file": str(name)} for name, part in sorted(parts.items()) for chunk in part.notes["chunks"]]
    by_tensor: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_tensor.setdefault(row["key"], []).append(row)
    _require_cover(folder, by_tensor, arch)
    metadata = pickle.dumps(_metadata(by_tensor), protocol=4)
    write_atomic(folder / METADATA_NAME, lambda file: file.write(metadata))
    write_json(folder / "metadata.json", MEGATRON_FORMAT)
    write_atomic(folder / "common.pt", _write_common)


def _require_cover(folder: Path, by_tensor: Mapping[str, Sequence[dict[str, Any]]], arch: Architecture) -> None:
    expected = {key: placements[0].global_shape for key, placements in by_key(arch).items()}
    wrong = [f"{key}: in no part" for key in expected if key not in by_tensor]
    for key, rows in by_tensor.items():
        boxes = [(tuple(row["offsets"]), tuple(row["sizes"])) for row in rows]
        if key not in expected:
            wrong.append(f"{key}: unknown to the architecture")
        elif any(tuple(row["global_shape"]) != expected[key] for row in rows):
            wrong.append(f"{key}: not of the shape {list(expected[key])}")
        elif misfit := find_misfit(expected[key], boxes):
            wrong.append(f"{key}: {misfit} of {list(expected[key])}")
    if wrong:
        raise CheckpointError(f"{folder}: the parts do not make up the model:\n  " + "\n  ".join(wrong[:20]))


def _metadata(by_tensor: Mapping[str, Sequence[dict[str, Any]]]) -> Metadata:
    tensors: dict[str, STORAGE_TYPES] = {}
    places = {}
    for key, rows in sorted(by_tensor.items()):
        properties = TensorProperties(dtype=TORCH_DTYPES[rows[0]["dtype"]])
        chunks: list[ChunkStorageMetadata] = []
        for row in sorted(rows, key=lambda row: row["offsets"]):
            offsets, sizes = torch.Size(row["offsets"]), torch.Size(row["sizes"])
            places[MetadataIndex(key, offsets, len(chunks))] = _StorageInfo(row["file"], row["start"], row["length"])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        tensors[key] = TensorStorageMetadata(properties, torch.Size(rows[0]["global_shape"]), chunks)
    return Metadata(state_dict_metadata=tensors, storage_data=places, version=CURRENT_DCP_VERSION)


def _write_common(opened: BinaryIO) -> None:
    """Write Megatron's dictionary of what is no tensor."""
    # Given a file with a name, torch.save would write that of the temporary file into it.
    with HashingFile(opened) as file:
        torch.save(COMMON_STATE, cast(BinaryIO, file))


# ---- proof ----


def verify_torch_dist(source: Path, folder: Path, arch: Architecture, num_threads: int = 1) -> int:
    """Read a converted checkpoint again and compare every tensor with its source, bit by bit.

    Args:
        source: Checkpoint in Hub layout.
        folder: The `torch_dist` folder.
        arch: Dimensions of the model.
        num_threads: Tensors compared at a time.

    Returns:
        Number of tensors compared.

    Raises:
        CheckpointError: Listing the tensors that differ or cannot be read, with key and file.
    """
    reader, converted = CheckpointReader(source), TorchDistReader(folder)
    placements = to_megatron(arch)
    total = sum(placement.size_bytes for placement in placements)
    differences = []
    with ProgressBar("verify", total) as bar, ThreadPoolExecutor(num_threads) as pool:
        compare = functools.partial(_difference, reader, converted)
        for placement, difference in zip(placements, pool.map(compare, placements), strict=True):
            bar.advance(placement.size_bytes)
            differences += [difference] if difference else []
    if differences:
        raise CheckpointError(
            f"{folder} differs from {source} in {len(differences)} tensors:\n  " + "\n  ".join(differences[:20])
        )
    return len(placements)


def _difference(reader: CheckpointReader, converted: TorchDistReader, placement: Placement) -> str:
    original = reader.tensor(placement.hf_name)
    for (offsets, sizes), rows in placement.chunks:
        try:
            stored = converted.read(placement.key, offsets, sizes)
        except CheckpointError as error:
            return str(error)
        if stored.dtype != original.dtype or not torch.equal(_bits(stored), _bits(original[rows])):
            return f"{placement.key} at {list(offsets)} is not {placement.hf_name} bit by bit"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals itself and -0 does not equal 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)

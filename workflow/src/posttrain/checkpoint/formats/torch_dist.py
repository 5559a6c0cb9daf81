"""Writes Megatron's distributed checkpoint (`torch_dist`) from the Hub's, in independent parts.

The format is `torch.distributed.checkpoint`'s: `*.distcp` files with a sequence of chunks, each written by torch.save,
and `.metadata` with the place of each tensor's chunks. `metadata.json` and `common.pt` are Megatron's. Each Hub tensor
becomes one or a few chunks (`param_names`), so a part needs neither a model nor other parts: it copies its tensors and
notes their places, and the last step joins the notes to `.metadata`. Tensors are copied from the mapped source file,
never held in memory.

Megatron loads the result in any layout; `TorchDistReader` reads it without Megatron.
"""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
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

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.shard_writer import (
    TORCH_DTYPES,
    assign_shards,
    count_not_finite,
    split_evenly,
    tensor_bytes,
)
from posttrain.checkpoint.formats.torch_dist_reader import METADATA_NAME, TorchDistReader
from posttrain.checkpoint.param_names import Placement, by_key, require_tensors, to_megatron
from posttrain.checkpoint.parts.parts import Description, Notes, OutputFile
from posttrain.checkpoint.parts.steps import Written
from posttrain.checkpoint.quantization.tiling import Chunk, find_misfit
from posttrain.checkpoint.staging.file_placement import HashingFile
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError
from posttrain.report.progress import ProgressBar
from posttrain.store import write_atomic, write_json

log = logging.getLogger(__name__)

STEP, FINALIZE_STEP = "convert_hf_to_torch_dist", "finalize_torch_dist"
# Small, so that a kill loses little and several threads are busy; large, so that files are few.
MAX_FILE_BYTES = 4 * 10**9
# Approximate bytes that torch.save adds to a chunk's data.
CHUNK_OVERHEAD_BYTES = 1600
# Megatron's `dist_checkpointing` reads this first.
MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Megatron reads this from `common.pt` before a model's names: each layer has its own.
COMMON_STATE = {"content_metadata": {"non_homogeneous_layers": True}}
FORMAT_FILES = (METADATA_NAME, "metadata.json", "common.pt")


class Conversion(Written):
    """A checkpoint in Megatron's format, made in parts; see `steps.Making`.

    Each part copies consecutive tensors of about equal bytes to its own files, `__{part}_{n}.distcp`.

    Args:
        source: Checkpoint in Hub layout.
        source_digest: Digest of its receipt.
        arch: Dimensions of the model.
        max_file_bytes: Limit of a file's data.
        threads_to_verify: Threads that compare the checkpoint with the source before publication; 0 skips this.
    """

    def __init__(
        self,
        source: Path,
        source_digest: str,
        arch: Architecture,
        max_file_bytes: int = MAX_FILE_BYTES,
        threads_to_verify: int = 0,
    ):
        self._source, self._source_digest, self._arch = source, source_digest, arch
        self._max_file_bytes, self._threads_to_verify = max_file_bytes, threads_to_verify

    def names(self, num_parts: int) -> Collection[str]:
        """Return the files of all parts."""
        return [name for part in range(num_parts) for name in self._files_of(part, num_parts)]

    def files(self, part: int, num_parts: int) -> Sequence[OutputFile]:
        """Return a part's files; their notes list the chunks.

        Raises:
            CheckpointError: The source's tensors differ from the architecture's; lists all differences.
        """
        reader = CheckpointReader(self._source)
        require_tensors(reader, self._arch)
        groups = self._files_of(part, num_parts)
        return [_output_file(reader, self._source_digest, name, group) for name, group in groups.items()]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return nothing: source and format determine the result."""
        return {}

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> tuple[str, ...]:
        """Write the files that turn chunks into a checkpoint.

        Raises:
            CheckpointError: Lists tensors that the chunks do not cover exactly once.
        """
        # Plain text, so that readers of the format unpickle no classes of ours.
        rows = [{**chunk, "file": str(name)} for name, part in sorted(parts.items()) for chunk in part.notes["chunks"]]
        by_tensor: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_tensor.setdefault(row["key"], []).append(row)
        _require_cover(partial, by_tensor, self._arch)
        metadata = pickle.dumps(_metadata(by_tensor), protocol=4)
        write_atomic(partial / METADATA_NAME, lambda file: file.write(metadata))
        write_json(partial / "metadata.json", MEGATRON_FORMAT)
        write_atomic(partial / "common.pt", _write_common)
        if self._threads_to_verify:
            torch.set_num_threads(1)
            verify_torch_dist(self._source, partial, self._arch, self._threads_to_verify)
        return FORMAT_FILES

    def _files_of(self, part: int, num_parts: int) -> dict[str, list[Placement]]:
        by_name = {placement.hf_name: placement for placement in split_placements(self._arch, num_parts)[part]}
        sizes = {name: placement.size_bytes for name, placement in by_name.items()}
        groups = assign_shards(sizes, self._max_file_bytes).values()
        return {f"__{part}_{n}.distcp": [by_name[name] for name in names] for n, names in enumerate(groups)}


def split_placements(arch: Architecture, num_parts: int) -> list[list[Placement]]:
    """Return the tensors of each part: consecutive ones of about equal bytes."""
    placements = to_megatron(arch)
    shares = split_evenly([placement.size_bytes for placement in placements], num_parts)
    return [[placements[i] for i in share] for share in shares]


def _output_file(
    reader: CheckpointReader, source_digest: str, name: str, placements: Sequence[Placement]
) -> OutputFile:
    chunks = [_chunk_row(placement, box) for placement in placements for box in placement.boxes]
    return OutputFile(
        path=name,
        size_bytes=sum(placement.size_bytes for placement in placements) + CHUNK_OVERHEAD_BYTES * len(chunks),
        made_from={"source": source_digest, "chunks": chunks},
        write=functools.partial(_write_chunks, reader, placements),
    )


def _chunk_row(placement: Placement, box: Chunk) -> dict[str, Any]:
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
    """Return the same memory with its own storage, because torch.save of a view would write the whole file."""
    return torch.frombuffer(tensor_bytes(tensor), dtype=tensor.dtype).reshape(tensor.shape)


def _require_finite(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Return a tensor, or reject it: in training one NaN would spread to all weights."""
    tensor = reader.tensor(name)
    if num_bad := count_not_finite(tensor):
        raise CheckpointError(
            "values-not-finite",
            f"{reader.folder / reader.file_of(name)}: {name}: {num_bad} of {tensor.numel()} values are NaN or "
            "infinite; get the file anew from its source, or another revision of the model",
        )
    return tensor


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
        raise CheckpointError(
            "parts-incomplete", f"{folder}: the parts do not make up the model:\n  " + "\n  ".join(wrong[:20])
        )


def planned_metadata(arch: Architecture) -> Metadata:
    """Return the tensors and chunks of a converted model, with placeholders for the chunks' places."""
    nowhere = {"file": "nowhere", "start": 0, "length": 0}
    return _metadata(
        {
            key: [_chunk_row(placement, box) | nowhere for placement in placements for box in placement.boxes]
            for key, placements in by_key(arch).items()
        }
    )


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
    """Write Megatron's dictionary of non-tensor state."""
    # torch.save would write the temporary file's name into a named file.
    with HashingFile(opened) as file:
        torch.save(COMMON_STATE, cast(BinaryIO, file))


# ---- proof ----


def verify_torch_dist(source: Path, folder: Path, arch: Architecture, num_threads: int = 1) -> int:
    """Read a converted checkpoint, and compare every tensor with its source bit by bit.

    Args:
        source: Checkpoint in Hub layout.
        folder: The `torch_dist` folder.
        arch: Dimensions of the model.
        num_threads: Tensors compared concurrently.

    Returns:
        Number of tensors compared.

    Raises:
        CheckpointError: Lists tensors that differ or are unreadable, with key and file.
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
            "conversion-differs",
            f"{folder} differs from {source} in {len(differences)} tensors:\n  " + "\n  ".join(differences[:20]),
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
    """Return a tensor's bytes, so that NaN equals itself and -0 does not equal 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)

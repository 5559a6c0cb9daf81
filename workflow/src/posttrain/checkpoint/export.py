"""A trained model in the layout of a Hub repository, from the trainer's distributed checkpoint.

The origin, the checkpoint that training began with, gives the form: the same shards, the same index order,
each tensor in the origin's precision, its config and tokenizer. The trainer's checkpoint gives the values.
What a trainer does not hold, the MTP layers and the copies of embedding and head in them, is the origin's.
The origin's shards are split over parts that know nothing of each other, and values pass a few rows at a time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain.artifacts import FileRecord, Receipt, RelativeName, hash_file, read_receipt, receipt_of, record_files
from posttrain.checkpoint.formats.safetensors_io import (
    INDEX_NAME,
    CheckpointReader,
    TensorInfo,
    TensorSpec,
    read_header,
    read_metadata,
)
from posttrain.checkpoint.formats.shard_writer import (
    TORCH_DTYPES,
    HashingFile,
    split_evenly,
    tensor_bytes,
    write_index,
    write_shard,
)
from posttrain.checkpoint.formats.torch_dist_reader import METADATA_NAME, TorchDistReader
from posttrain.checkpoint.param_names import (
    Placement,
    by_hf_name,
    by_key,
    find_placement,
    newest_checkpoint,
    require_tensors,
    to_megatron,
)
from posttrain.checkpoint.parts.parts import (
    Description,
    Notes,
    OutputFile,
    copy_other_files,
    description_path,
    make_files,
    remove_strangers,
)
from posttrain.checkpoint.quantization.tiling import Shape
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError

log = logging.getLogger(__name__)

STEP, FINALIZE_STEP = "export_hf", "finalize_export_hf"
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Export:
    """What is exported, in which form.

    Args:
        trained: The trainer's checkpoint.
        origin: The checkpoint that training began with.
        placements: Hub name -> place in the trainer's checkpoint, of every tensor that it holds.
    """

    trained: TorchDistReader
    origin: CheckpointReader
    placements: Mapping[str, Placement]


def open_export(checkpoint: Path, origin: Path, arch: Architecture) -> Export:
    """Open both sides and check that together they hold the whole model.

    Args:
        checkpoint: A `torch_dist` folder, converted or written by training in any layout and precision; or the folder
            in which slime, miles or Megatron-LM keep theirs.
        origin: Checkpoint in Hub layout.
        arch: Dimensions of the model.

    Raises:
        CheckpointError: When the origin is of another architecture, a file of the checkpoint is missing or
            too short, a weight is missing or has another shape, or the checkpoint has an MTP layer in part.
    """
    reader, trained = CheckpointReader(origin), TorchDistReader(newest_checkpoint(checkpoint))
    require_tensors(reader, arch)
    trained.check_files()

    def shape_of(key: str) -> Shape | None:
        return trained.shape(key) if key in trained else None

    found = {place.hf_name: find_placement(place, arch, shape_of) for place in to_megatron(arch)}
    placements = {name: place for name, place in found.items() if place}
    if wrong := [*_wrong_shapes(trained, placements), *_missing(found, arch)]:
        shown = [*wrong[:20], f"... and {len(wrong) - 20} more"] if len(wrong) > 20 else wrong
        raise CheckpointError(f"{trained.folder}: cannot be exported:\n  " + "\n  ".join(shown))
    num_kept = len(reader) - len(placements)
    log.info("%d tensors from %s, %d from %s", len(placements), trained.folder, num_kept, origin)
    return Export(trained, reader, placements)


def _wrong_shapes(trained: TorchDistReader, placements: Mapping[str, Placement]) -> list[str]:
    shapes = {place.key: place.global_shape for place in placements.values()}
    return [
        f"{key}: {list(trained.shape(key))}, expected {list(shape)}"
        for key, shape in shapes.items()
        if trained.shape(key) != shape
    ]


def _missing(found: Mapping[str, Placement | None], arch: Architecture) -> list[str]:
    """Return what the trainer must hold but does not; the MTP layers may be absent, but only altogether."""
    table = by_hf_name(arch)
    absent = {table[name].key for name, place in found.items() if place is None}
    mtp_keys = {key for key in by_key(arch) if key.startswith("mtp.")}
    needed = absent - mtp_keys if mtp_keys <= absent else absent
    return [f"{key}: missing" for key in by_key(arch) if key in needed]


def checkpoint_of(folder: Path, receipt: Receipt) -> Path:
    """Return the `torch_dist` folder that a receipt speaks of.

    Args:
        folder: What the receipt is about: a training's run folder, or the checkpoint itself.
        receipt: Of a finished training, which names its final checkpoint, or of a converted checkpoint.
    """
    name = receipt.settings.get("final_checkpoint", "")
    return folder / RelativeName(name) if name else folder


def identify_checkpoint(folder: Path) -> str:
    """Return what tells a checkpoint without a receipt from others: the hash of its metadata."""
    path = newest_checkpoint(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; not a torch_dist checkpoint")
    return hash_file(path)


# ---- writing ----


def write_part(
    export: Export, made_from: Mapping[str, str], folder: Path, part: int, num_parts: int, num_threads: int = 1
) -> list[Description]:
    """Write a part's share of the origin's shards with the trained values.

    Args:
        export: See `open_export`.
        made_from: Digests of both sides' receipts; a change makes all be written again.
        folder: Final name of the exported folder.
        part: Which share, from 0.
        num_parts: How many shares.
        num_threads: Shards written at a time.

    Returns:
        A description of each shard; its notes hold the hash of each tensor.
    """
    files = [_output_file(export, made_from, name) for name in split_shards(export.origin, num_parts)[part]]
    return make_files(folder, files, f"export part {part} of {num_parts}", num_threads)


def split_shards(origin: CheckpointReader, num_parts: int) -> list[list[str]]:
    """Return each part's share: consecutive shards of about equal bytes."""
    names = origin.index.files
    shares = split_evenly([(origin.folder / name).stat().st_size for name in names], num_parts)
    return [[names[i] for i in share] for share in shares]


def finalize_folder(
    origin: CheckpointReader, parts: Mapping[str, Description], partial: Path
) -> tuple[FileRecord, ...]:
    """Write the index, and copy config, tokenizer and the like.

    Args:
        origin: Its shards are what the parts must have written.
        parts: File name -> description, of all parts.
        partial: Holds the parts' files.

    Returns:
        Records of the files that are no shards.

    Raises:
        CheckpointError: When the parts are not the origin's shards.
    """
    if differing := sorted(set(origin.index.files) ^ set(parts)):
        raise CheckpointError(f"{partial}: the parts are not the shards of {origin.folder}: {differing[:20]}")
    specs = {name: info.spec for name, info in origin.infos.items()}
    write_index(partial, origin.index.weight_map, specs)
    small = [INDEX_NAME, *copy_other_files(origin.folder, partial)]
    remove_strangers(partial, keep={*origin.index.files, *small})
    return record_files(partial, small)


def refuse_foreign_folder(folder: Path) -> None:
    """Protect what something else put where the export would go.

    Raises:
        CheckpointError: When the folder exists and neither a receipt of an export nor the traces of an
            unfinished one stand beside it.
    """
    if not folder.exists() or description_path(folder, "").parent.exists():
        return
    receipt = receipt_of(folder)
    if not receipt.exists() or read_receipt(receipt).step != FINALIZE_STEP:
        raise CheckpointError(f"{folder}: exists, and was not made by {STEP}; move it away, or export elsewhere")


def _output_file(export: Export, made_from: Mapping[str, str], name: str) -> OutputFile:
    header = read_header(export.origin.folder / name)
    held = {tensor: info for tensor, info in header.items() if export.origin.index.weight_map.get(tensor) == name}
    return OutputFile(
        name=name,
        size_bytes=sum(info.size_bytes for info in held.values()),
        made_from={**made_from, "tensors": list(held)},
        write=functools.partial(_write_shard, export, held, read_metadata(export.origin.folder / name)),
    )


def _write_shard(
    export: Export, held: Mapping[str, TensorInfo], metadata: Mapping[str, str], file: HashingFile
) -> Notes:
    hashes = {}

    def read(name: str) -> Iterator[torch.Tensor]:
        state = hashlib.sha256()
        for rows in _read_trained(export, name):
            state.update(tensor_bytes(rows))
            yield rows
        hashes[name] = _hash_line(name, export.origin.info(name).spec, state.hexdigest())

    write_shard(file, {name: info.spec for name, info in held.items()}, read, metadata)
    return {"tensors": hashes}


def _read_trained(export: Export, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in the origin's precision, a few at a time."""
    place = export.placements.get(name)
    if place is None:
        yield export.origin.tensor(name)
        return
    dtype = TORCH_DTYPES[export.origin.dtype(name)]
    for box in place.boxes:
        for rows in export.trained.read_rows(place.key, *box, axis=place.num_stack_axes):
            yield rows.to(dtype)


# ---- identity ----


def final_weights_sha256(folder: Path, num_threads: int = 1) -> str:
    """Return one hash of all weights of a checkpoint in Hub layout, whatever its shards.

    It is the SHA-256 of one line per tensor, sorted by name: name, dtype, shape and the SHA-256 of its bytes.

    Args:
        folder: The checkpoint.
        num_threads: Tensors hashed at a time.

    Raises:
        CheckpointError: When the checkpoint is not complete.
    """
    reader = CheckpointReader(folder)
    names = sorted(reader)
    with ThreadPoolExecutor(num_threads) as pool:
        hashes = pool.map(lambda name: _hash_tensor(folder / reader.file_of(name), reader.info(name)), names)
        lines = [_hash_line(name, reader.info(name).spec, content) for name, content in zip(names, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def combine_hashes(parts: Iterable[Description]) -> str:
    """Return `final_weights_sha256` of what the parts wrote, from the hashes that they took while writing."""
    lines = {name: line for part in parts for name, line in part.notes["tensors"].items()}
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def _hash_line(name: str, spec: TensorSpec, content: str) -> str:
    return f"{name} {spec} {content}\n"


def _hash_tensor(path: Path, info: TensorInfo) -> str:
    state = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(info.start)
        left = info.size_bytes
        while left:
            chunk = file.read(min(left, _READ_BYTES))
            if not chunk:
                raise CheckpointError(f"{path}: truncated while it was read; {info.name} ends at {info.end}")
            state.update(chunk)
            left -= len(chunk)
    return state.hexdigest()

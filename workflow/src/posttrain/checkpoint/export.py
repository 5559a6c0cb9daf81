"""Exports a trained model from the trainer's distributed checkpoint to Hub layout.

The origin, the checkpoint with which training began, determines the form: shards, order of the index, precision of each
tensor, config and tokenizer. The trainer's checkpoint provides the values. Copies (a tied model's output matrix,
embedding and output matrix of an MTP layer) get the value of their original. MTP layers that the trainer does not hold
come from the origin. The origin's shards are divided over independent parts, and values are read a few rows at a time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    split_evenly,
    tensor_bytes,
    write_index,
    write_shard,
)
from posttrain.checkpoint.formats.torch_dist_reader import METADATA_NAME, TorchDistReader
from posttrain.checkpoint.param_names import (
    KEY_MTP,
    KEY_VISION,
    Placement,
    by_hf_name,
    by_key,
    find_placement,
    newest_checkpoint,
    optional_copies,
    require_tensors,
    to_megatron,
)
from posttrain.checkpoint.parts.parts import Description, Notes, OutputFile, copy_other_files, description_path
from posttrain.checkpoint.parts.steps import Written
from posttrain.checkpoint.quantization.tiling import Shape
from posttrain.checkpoint.reference_logprobs import (
    CANARY_NAME,
    ReferenceLogprobs,
    read_reference_logprobs,
    write_reference_logprobs,
)
from posttrain.checkpoint.staging.file_placement import HashingFile
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError
from posttrain.store import Receipt, RelativeName, hash_file, read_receipt, receipt_of

log = logging.getLogger(__name__)

STEP, FINALIZE_STEP = "export_hf", "finalize_export_hf"
# Large compared with the cost of a call, small compared with each thread's memory.
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class TrainedModel:
    """Source and form of an export.

    Args:
        trained: The trainer's checkpoint.
        origin: The checkpoint with which training began.
        placements: Hub name -> placement in the trainer's checkpoint, for every tensor that it holds.
        canary: The trainer's reference log-probabilities of a few prompts; None if the checkpoint has none.
    """

    trained: TorchDistReader
    origin: CheckpointReader
    placements: Mapping[str, Placement]
    canary: ReferenceLogprobs | None = None


def open_trained(checkpoint: Path, origin: Path, arch: Architecture, keeps_mtp_copies: bool = False) -> TrainedModel:
    """Open both checkpoints, and check that together they hold the whole model.

    Args:
        checkpoint: A `torch_dist` folder, converted or written by training in any layout and precision; or the folder
            of checkpoints of slime, miles or Megatron-LM.
        origin: Checkpoint in Hub layout.
        arch: Dimensions of the model.
        keeps_mtp_copies: Embedding and output matrix of MTP layers are not copies, and come from the origin.

    Raises:
        CheckpointError: The origin has another architecture, a file is missing or too short, a weight is missing or has
            another shape, or the checkpoint has only part of an MTP layer.
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
        raise CheckpointError("not-exportable", f"{trained.folder}: cannot be exported:\n  " + "\n  ".join(shown))
    if not keeps_mtp_copies:
        copies = optional_copies(arch).items()
        placements |= {copy: placements[copied] for copy, copied in copies if copy in reader}
    num_kept = len(reader) - len(placements)
    log.info("%d tensors from %s, %d from %s", len(placements), trained.folder, num_kept, origin)
    return TrainedModel(trained, reader, placements, read_reference_logprobs(trained.folder))


def _wrong_shapes(trained: TorchDistReader, placements: Mapping[str, Placement]) -> list[str]:
    shapes = {place.key: place.global_shape for place in placements.values()}
    return [
        f"{key}: {list(trained.shape(key))}, expected {list(shape)}"
        for key, shape in shapes.items()
        if trained.shape(key) != shape
    ]


def _missing(found: Mapping[str, Placement | None], arch: Architecture) -> list[str]:
    """Return the keys that the trainer's checkpoint lacks.

    MTP layers and a vision tower may be absent, but each only as a whole.
    """
    table = by_hf_name(arch)
    needed = {table[name].key for name, place in found.items() if place is None}
    for part in (KEY_MTP, KEY_VISION):
        keys = {key for key in by_key(arch) if key.startswith(part)}
        needed -= keys if keys <= needed else set()
    return [f"{key}: missing" for key in by_key(arch) if key in needed]


def checkpoint_of(folder: Path, receipt: Receipt) -> Path:
    """Return the `torch_dist` folder of a receipt.

    Args:
        folder: The receipt's folder: a run folder of training, or the checkpoint itself.
        receipt: Of finished training, with the name of its final checkpoint, or of a converted checkpoint.
    """
    name = receipt.settings.get("final_checkpoint", "")
    return folder / RelativeName(name) if name else folder


def identify_checkpoint(folder: Path) -> str:
    """Return the identity of a checkpoint without a receipt: its metadata's hash."""
    path = newest_checkpoint(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointError("metadata-missing", f"{path}: no such file; not a torch_dist checkpoint")
    return hash_file(path)


# ---- writing ----


class HubExport(Written):
    """The exported folder, made in parts; see `steps.Making`.

    Args:
        origin: The checkpoint with which training began; the parts write its shards.
        made_from: Digests of both receipts; if one changes, all parts are written again.
        trained: The values to write; the last step does not need them.
    """

    def __init__(self, origin: CheckpointReader, made_from: Mapping[str, str], trained: TrainedModel | None = None):
        self._origin, self._made_from, self._trained = origin, made_from, trained

    def names(self, num_parts: int) -> Collection[str]:
        """Return the origin's shards."""
        return self._origin.index.files

    def files(self, part: int, num_parts: int) -> Sequence[OutputFile]:
        """Return a part's shards, consecutive ones of about equal bytes; their notes hold the hash of each tensor."""
        assert self._trained, "a part was given what it writes"
        names = self._origin.index.files
        share = split_evenly([(self._origin.folder / name).stat().st_size for name in names], num_parts)[part]
        # The last step opens no trained model, so the first shard's notes carry what belongs to no shard.
        notes = {names[0]: {"canary": self._trained.canary.as_dict()}} if self._trained.canary else {}
        return [_output_file(self._trained, self._made_from, names[i], notes.get(names[i], {})) for i in share]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return `final_weights_sha256`, from the hashes that the parts computed while writing."""
        lines = {name: line for part in parts.values() for name, line in part.notes["tensors"].items()}
        return {"final_weights_sha256": hashlib.sha256("".join(lines[n] for n in sorted(lines)).encode()).hexdigest()}

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> list[str]:
        """Write the index and the reference log-probabilities, and copy config, tokenizer and other files.

        The origin's own reference log-probabilities, if any, are not copied: they are those of other weights.
        """
        specs = {name: info.spec for name, info in self._origin.infos.items()}
        write_index(partial, self._origin.index.weight_map, specs)
        told = [part.notes["canary"] for part in parts.values() if "canary" in part.notes]
        own = [write_reference_logprobs(partial, ReferenceLogprobs.from_dict(content)) for content in told]
        return [INDEX_NAME, *own, *copy_other_files(self._origin.folder, partial, skip=[CANARY_NAME])]


def refuse_foreign_folder(folder: Path) -> None:
    """Reject a folder with files of another program at the export's path.

    Raises:
        CheckpointError: The folder exists, and has neither an export's receipt nor the traces of an unfinished export.
    """
    if not folder.exists() or description_path(folder, "").parent.exists():
        return
    receipt = receipt_of(folder)
    if not receipt.exists() or read_receipt(receipt).step != FINALIZE_STEP:
        raise CheckpointError(
            "folder-not-ours", f"{folder}: exists, and was not made by {STEP}; move it away, or export elsewhere"
        )


def _output_file(model: TrainedModel, made_from: Mapping[str, str], name: str, notes: Notes) -> OutputFile:
    header = read_header(model.origin.folder / name)
    held = {tensor: info for tensor, info in header.items() if model.origin.index.weight_map.get(tensor) == name}
    places = {tensor: model.placements[tensor] for tensor in held if tensor in model.placements}
    copies = {tensor: place.hf_name for tensor, place in places.items() if place.hf_name != tensor}
    return OutputFile(
        path=name,
        size_bytes=sum(info.size_bytes for info in held.values()),
        made_from={**made_from, "tensors": list(held), **({"copies": copies} if copies else {})},
        write=functools.partial(_write_shard, model, held, read_metadata(model.origin.folder / name), notes),
    )


def _write_shard(
    model: TrainedModel, held: Mapping[str, TensorInfo], metadata: Mapping[str, str], notes: Notes, file: HashingFile
) -> Notes:
    hashes = {}

    def read(name: str) -> Iterator[torch.Tensor]:
        state = hashlib.sha256()
        for rows in _read_trained(model, name):
            state.update(tensor_bytes(rows))
            yield rows
        hashes[name] = _hash_line(name, model.origin.info(name).spec, state.hexdigest())

    write_shard(file, {name: info.spec for name, info in held.items()}, read, metadata)
    return {"tensors": hashes, **notes}


def _read_trained(model: TrainedModel, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in the origin's precision, a few at a time."""
    place = model.placements.get(name)
    if place is None:
        yield model.origin.tensor(name)
        return
    dtype = TORCH_DTYPES[model.origin.dtype(name)]
    for box in place.boxes:
        for rows in model.trained.read_rows(place.key, *box, axis=place.num_stack_axes):
            yield rows.to(dtype)


# ---- identity ----


def final_weights_sha256(folder: Path, num_threads: int = 1) -> str:
    """Return one hash of all weights of a checkpoint in Hub layout, independent of its shards.

    It is the SHA-256 of one line per tensor, sorted by name: name, dtype, shape and the SHA-256 of its bytes.

    Args:
        folder: The checkpoint.
        num_threads: Tensors hashed concurrently.

    Raises:
        CheckpointError: The checkpoint is incomplete.
    """
    reader = CheckpointReader(folder)
    names = sorted(reader)
    with ThreadPoolExecutor(num_threads) as pool:
        hashes = pool.map(lambda name: _hash_tensor(folder / reader.file_of(name), reader.info(name)), names)
        lines = [_hash_line(name, reader.info(name).spec, content) for name, content in zip(names, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
                raise CheckpointError(
                    "file-truncated", f"{path}: truncated while it was read; {info.name} ends at {info.end}"
                )
            state.update(chunk)
            left -= len(chunk)
    return state.hexdigest()

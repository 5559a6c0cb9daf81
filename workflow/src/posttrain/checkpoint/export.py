"""A trained model in the layout of a Hub repository, from the trainer's distributed checkpoint.

The origin, the checkpoint that training began with, gives the form: the same shards, the same index order,
each tensor in the origin's precision, its config and tokenizer. The trainer's checkpoint gives the values.
A copy (a tied model's output matrix, embedding and output matrix of an MTP layer) gets the value of what it copies.
MTP layers that the trainer does not hold are the origin's. The origin's shards are split over parts that know nothing
of each other, and values pass a few rows at a time.
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
# Large enough that reading costs no more calls than hashing takes, small beside the memory of each thread.
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class TrainedModel:
    """The source and the form of an export.

    Args:
        trained: The trainer's checkpoint.
        origin: The checkpoint that training began with.
        placements: Hub name -> place in the trainer's checkpoint, of every tensor that it holds.
        canary: What the trainer's model says of a few prompts; None where the checkpoint tells nothing of it.
    """

    trained: TorchDistReader
    origin: CheckpointReader
    placements: Mapping[str, Placement]
    canary: ReferenceLogprobs | None = None


def open_trained(checkpoint: Path, origin: Path, arch: Architecture, keeps_mtp_copies: bool = False) -> TrainedModel:
    """Open both sides and check that together they hold the whole model.

    Args:
        checkpoint: A `torch_dist` folder, converted or written by training in any layout and precision; or the folder
            in which slime, miles or Megatron-LM keep theirs.
        origin: Checkpoint in Hub layout.
        arch: Dimensions of the model.
        keeps_mtp_copies: Embedding and output matrix of MTP layers are no copies, and stay the origin's.

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
    """Return the identity of a checkpoint without a receipt: the hash of its metadata."""
    path = newest_checkpoint(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; not a torch_dist checkpoint")
    return hash_file(path)


# ---- writing ----


class HubExport(Written):
    """A trained model in Hub layout as a folder that is made in parts; see `steps.Making`.

    Args:
        origin: The checkpoint that training began with: its shards are what the parts write.
        made_from: Digests of both sides' receipts; a change makes all be written again.
        trained: What the parts write; the last step needs none of it.
    """

    def __init__(self, origin: CheckpointReader, made_from: Mapping[str, str], trained: TrainedModel | None = None):
        self._origin, self._made_from, self._trained = origin, made_from, trained

    def names(self, num_parts: int) -> Collection[str]:
        """Return the origin's shards."""
        return self._origin.index.files

    def files(self, part: int, num_parts: int) -> Sequence[OutputFile]:
        """Return a part's share: consecutive shards of about equal bytes; their notes hold the hash of each tensor."""
        assert self._trained, "a part was given what it writes"
        names = self._origin.index.files
        share = split_evenly([(self._origin.folder / name).stat().st_size for name in names], num_parts)[part]
        # The last step opens no trained model: what belongs to none of the shards comes to it with the first.
        notes = {names[0]: {"canary": self._trained.canary.as_dict()}} if self._trained.canary else {}
        return [_output_file(self._trained, self._made_from, names[i], notes.get(names[i], {})) for i in share]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return `final_weights_sha256` of what the parts wrote, from the hashes that they took while writing."""
        lines = {name: line for part in parts.values() for name, line in part.notes["tensors"].items()}
        return {"final_weights_sha256": hashlib.sha256("".join(lines[n] for n in sorted(lines)).encode()).hexdigest()}

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> list[str]:
        """Write the index and the canary, and copy config, tokenizer and the like.

        The origin's own canary, if it has one, is of other weights.
        """
        specs = {name: info.spec for name, info in self._origin.infos.items()}
        write_index(partial, self._origin.index.weight_map, specs)
        told = [part.notes["canary"] for part in parts.values() if "canary" in part.notes]
        own = [write_reference_logprobs(partial, ReferenceLogprobs.from_dict(content)) for content in told]
        return [INDEX_NAME, *own, *copy_other_files(self._origin.folder, partial, skip=[CANARY_NAME])]


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

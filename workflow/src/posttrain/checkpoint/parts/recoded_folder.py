"""A checkpoint in Hub layout made from another, tensor by tensor, with its numbers in another format.

Quantising and casting back are such recodings. The shards follow from the source's names, shapes and dtypes
alone (`shard_writer.assign_shards`), and each is written whole by one part. So the folder has the same bytes
for any number of parts and threads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.artifacts import FileRecord, record_files, write_json
from posttrain.checkpoint.formats.safetensors_io import INDEX_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.formats.shard_writer import (
    MAX_SHARD_BYTES,
    HashingFile,
    assign_shards,
    count_not_finite,
    split_evenly,
    write_index,
    write_shard,
)
from posttrain.checkpoint.parts.parts import (
    Description,
    Notes,
    OutputFile,
    copy_other_files,
    make_files,
    remove_strangers,
)
from posttrain.errors import CheckpointError


class Recoding(Protocol):
    """What becomes of each tensor of a checkpoint.

    Attributes:
        reader: The source.
        names: The source's tensors, those that only say how to read another one left out.
        settings: Everything besides the source that decides the bytes, as JSON.
    """

    reader: CheckpointReader
    names: Sequence[str]
    settings: Mapping[str, Any]

    def specs(self, hf_name: str) -> Mapping[str, TensorSpec]:
        """Return names, shapes and dtypes of what `recode` makes of a tensor."""

    def recode(self, hf_name: str) -> Mapping[str, torch.Tensor]:
        """Return what is stored for a tensor."""

    def small_files(self) -> Mapping[str, Any]:
        """Return config.json and what else is written as JSON: name -> content, or None for a file left out."""


def plan_shards(recoding: Recoding) -> dict[str, list[str]]:
    """Return file name -> tensors of the source, in its order; about as many shards as the source has.

    All that is made of one tensor lies in one file.
    """
    sizes = {name: sum(spec.size_bytes for spec in recoding.specs(name).values()) for name in recoding.names}
    share = -(-sum(sizes.values()) // len(recoding.reader.index.files))
    return assign_shards(sizes, min(MAX_SHARD_BYTES, share))


# ---- a part ----


def write_part(
    recoding: Recoding,
    source_digest: str,
    folder: Path,
    part: int,
    num_parts: int,
    num_threads: int = 1,
) -> list[Description]:
    """Write a part's share of the shards.

    Args:
        recoding: Source and format.
        source_digest: Digest of the source's receipt.
        folder: Final name of the folder.
        part: Which share, from 0.
        num_parts: How many shares.
        num_threads: Shards written at a time.

    Returns:
        A description of each shard.

    Raises:
        CheckpointError: When a tensor cannot be recoded; the text names it and its file.
    """
    shards = [_output_file(recoding, source_digest, name, held) for name, held in plan_shards(recoding).items()]
    share = split_evenly([shard.size_bytes for shard in shards], num_parts)[part]
    return make_files(folder, [shards[i] for i in share], f"part {part} of {num_parts}", num_threads)


def _output_file(recoding: Recoding, source_digest: str, name: str, held: Sequence[str]) -> OutputFile:
    specs = _specs_of(recoding, held)
    return OutputFile(
        name=name,
        size_bytes=sum(spec.size_bytes for spec in specs.values()),
        made_from={"source": source_digest, "tensors": list(held), "format": recoding.settings},
        write=functools.partial(_write_shard, recoding, held),
    )


def _specs_of(recoding: Recoding, held: Sequence[str]) -> dict[str, TensorSpec]:
    return {name: spec for hf_name in held for name, spec in recoding.specs(hf_name).items()}


def _write_shard(recoding: Recoding, held: Sequence[str], file: HashingFile) -> Notes:
    """Write one shard; what is made of a tensor is kept until something is made of another one."""
    source_of = {name: hf_name for hf_name in held for name in recoding.specs(hf_name)}
    made: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        if name not in made:
            made.clear()
            made.update(_recode(recoding, source_of[name]))
        return made.pop(name)

    write_shard(file, _specs_of(recoding, held), read)
    return {}


def _recode(recoding: Recoding, hf_name: str) -> Mapping[str, torch.Tensor]:
    try:
        made = recoding.recode(hf_name)
        for name, tensor in made.items():
            if num_bad := count_not_finite(tensor):
                raise CheckpointError(f"{name}: {num_bad} of {tensor.numel()} values are NaN or infinite")
        return made
    except CheckpointError as error:
        reader = recoding.reader
        # What is read from several tensors has the name of none.
        path = reader.folder / reader.file_of(hf_name) if hf_name in reader else reader.folder
        raise CheckpointError(f"{path}: {error}") from error


# ---- the last step ----


def finalize_folder(recoding: Recoding, partial: Path, parts: Mapping[str, Description]) -> tuple[FileRecord, ...]:
    """Write index and config, and copy tokenizer and the like.

    Args:
        recoding: Source and format.
        partial: The folder in the making; it holds the shards.
        parts: File name -> description, of all parts.

    Returns:
        Records of all files.

    Raises:
        CheckpointError: When the parts are not exactly the shards that the source gives.
    """
    plan = plan_shards(recoding)
    if sorted(plan) != sorted(parts):
        raise CheckpointError(f"{partial}: shards {sorted(parts)} were made, the source gives {sorted(plan)}")
    weight_map = {name: file for file, held in plan.items() for name in _specs_of(recoding, held)}
    write_index(partial, weight_map, _specs_of(recoding, recoding.names))
    written = recoding.small_files()
    for name, content in written.items():
        if content is not None:
            write_json(partial / name, content)
    small = [INDEX_NAME, *(name for name, content in written.items() if content is not None)]
    small += copy_other_files(recoding.reader.folder, partial, skip=[*small, *written])
    remove_strangers(partial, keep={*parts, *small})
    return (*(part.record for part in parts.values()), *record_files(partial, small))

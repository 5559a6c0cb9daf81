"""A checkpoint in Hub layout made from another, tensor by tensor, in another number format.

Quantisation and the cast back are such recodings. The shards follow from the source's names, shapes and dtypes alone
(`shard_writer.assign_shards`), and one part writes each whole shard. The bytes therefore do not depend on the number of
parts and threads.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.checkpoint.formats.safetensors_io import INDEX_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.formats.shard_writer import (
    MAX_SHARD_BYTES,
    assign_shards,
    count_not_finite,
    split_evenly,
    write_index,
    write_shard,
)
from posttrain.checkpoint.parts.parts import Description, Notes, OutputFile, copy_other_files
from posttrain.checkpoint.parts.steps import Written
from posttrain.checkpoint.staging.file_placement import HashingFile
from posttrain.errors import CheckpointError
from posttrain.store import write_json


class Recoding(Protocol):
    """Converts each tensor of a checkpoint.

    Attributes:
        reader: The source.
        names: The source's tensors, without those that only describe how to read another.
        settings: Everything besides the source that determines the bytes, as JSON.
    """

    reader: CheckpointReader
    names: Sequence[str]
    settings: Mapping[str, Any]

    def specs(self, hf_name: str) -> Mapping[str, TensorSpec]:
        """Return names, shapes and dtypes of the output of `recode`."""

    def recode(self, hf_name: str) -> Mapping[str, torch.Tensor]:
        """Return the stored tensors of a source tensor."""

    def small_files(self) -> Mapping[str, Any]:
        """Return config.json and the other JSON files: name -> content, or None for a file that is omitted."""


def plan_shards(recoding: Recoding) -> dict[str, list[str]]:
    """Return file name -> source tensors, in order; about as many shards as the source has.

    One file holds the whole output of a tensor.
    """
    sizes = {name: sum(spec.size_bytes for spec in recoding.specs(name).values()) for name in recoding.names}
    share = -(-sum(sizes.values()) // len(recoding.reader.index.files))
    return assign_shards(sizes, min(MAX_SHARD_BYTES, share))


class RecodedFolder(Written):
    """A recoding as a folder that is made in parts; see `steps.Making`.

    Args:
        recoding: Source and format.
        source_digest: Digest of the source's receipt.
    """

    def __init__(self, recoding: Recoding, source_digest: str):
        self._recoding, self._source_digest = recoding, source_digest
        self._plan = plan_shards(recoding)

    def names(self, num_parts: int) -> Collection[str]:
        """Return the shard names, which do not depend on the number of parts."""
        return self._plan

    def files(self, part: int, num_parts: int) -> Sequence[OutputFile]:
        """Return a part's share: consecutive shards with about equal bytes."""
        shards = [self._output_file(name, held) for name, held in self._plan.items()]
        share = split_evenly([shard.size_bytes for shard in shards], num_parts)[part]
        return [shards[i] for i in share]

    def settings(self, parts: Mapping[str, Description]) -> Mapping[str, Any]:
        """Return the settings that determine the bytes."""
        return dict(self._recoding.settings)

    def complete(self, partial: Path, parts: Mapping[str, Description]) -> list[str]:
        """Write index and config, and copy the tokenizer and other small files."""
        recoding = self._recoding
        weight_map = {name: file for file, held in self._plan.items() for name in _specs_of(recoding, held)}
        write_index(partial, weight_map, _specs_of(recoding, recoding.names))
        written = recoding.small_files()
        for name, content in written.items():
            if content is not None:
                write_json(partial / name, content)
        small = [INDEX_NAME, *(name for name, content in written.items() if content is not None)]
        return small + copy_other_files(recoding.reader.folder, partial, skip=[*small, *written])

    def _output_file(self, name: str, held: Sequence[str]) -> OutputFile:
        specs = _specs_of(self._recoding, held)
        return OutputFile(
            path=name,
            size_bytes=sum(spec.size_bytes for spec in specs.values()),
            made_from={"source": self._source_digest, "tensors": list(held), "format": self._recoding.settings},
            write=functools.partial(_write_shard, self._recoding, held),
        )


def _specs_of(recoding: Recoding, held: Sequence[str]) -> dict[str, TensorSpec]:
    return {name: spec for hf_name in held for name, spec in recoding.specs(hf_name).items()}


def _write_shard(recoding: Recoding, held: Sequence[str], file: HashingFile) -> Notes:
    """Write one shard; caches one source tensor's output at a time."""
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
                raise CheckpointError(
                    "values-not-finite", f"{name}: {num_bad} of {tensor.numel()} values are NaN or infinite"
                )
        return made
    except CheckpointError as error:
        reader = recoding.reader
        # A tensor that is read from several others has no file of its own.
        path = reader.folder / reader.file_of(hf_name) if hf_name in reader else reader.folder
        raise CheckpointError(error.code, f"{path}: {error.text}") from error

"""Checks whether repeated tensors of a checkpoint are copies, and resolves those that are not.

Programs differ on a tied model whose file has another output matrix: transformers 5 unties it and uses the file's,
SGLang follows `tie_word_embeddings` and never reads it. Some engines read an MTP layer's embedding and output matrix,
others replace them with the model's. So `model.patch.copies` decides explicitly. Source: transformers 5.23,
`PreTrainedModel.tie_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from posttrain.checkpoint.formats.config_patch import Change, apply_changes
from posttrain.checkpoint.formats.config_sections import CONFIG, TIED, sections
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.param_names import HEAD, embedding_name, optional_copies
from posttrain.config.schema import Architecture
from posttrain.errors import Problem

# How to treat copies that differ (`model.patch.copies`).
REJECT, DROP, KEEP = "reject", "drop", "keep"
_READ_BYTES = 8 << 20


def differing_copies(config: Mapping[str, Any], arch: Architecture, reader: CheckpointReader) -> dict[str, str]:
    """Return each copy whose bytes differ from its original -> the original's name.

    It reads only the embedding and the output matrix, once per copy, a few megabytes at a time.

    Args:
        config: Content of `config.json`: if it ties embeddings, a separate output matrix is compared.
        arch: Dimensions of the model.
        reader: The checkpoint.
    """
    copies = optional_copies(arch) | ({HEAD: embedding_name(arch)} if config.get(TIED) else {})
    there = {copy: copied for copy, copied in copies.items() if copy in reader and copied in reader}
    return {copy: copied for copy, copied in there.items() if not _is_equal(reader, copy, copied)}


def read_as(config: Mapping[str, Any], differing: Mapping[str, str], choice: str) -> dict[str, Any]:
    """Return `config.json` after the choice: a kept output matrix is untied."""
    changes = untying_changes(config) if choice == KEEP and HEAD in differing else []
    return apply_changes(config, changes, CONFIG)


def untying_changes(config: Mapping[str, Any]) -> list[Change]:
    """Return the changes that declare output matrix and embedding untied, in each section that ties them."""
    places = [f"/{name}/{TIED}" if name else f"/{TIED}" for name, section in sections(config) if section.get(TIED)]
    return [Change("replace", place, True, False) for place in places]


def check_copies(
    config: Mapping[str, Any], arch: Architecture, reader: CheckpointReader, differing: Mapping[str, str], choice: str
) -> Iterator[Problem]:
    """Yield ambiguous tensors, each with the key that resolves it.

    Args:
        config: Content of `config.json`; a missing or null `tie_word_embeddings` is false in every family.
        arch: Dimensions of the model.
        reader: The checkpoint.
        differing: See `differing_copies`.
        choice: `model.patch.copies`.
    """
    ties = bool(config.get(TIED))
    for name, part in config.items():
        if isinstance(part, Mapping) and bool(part.get(TIED, ties)) != ties:
            remedy = "programs disagree on which one applies: set both to the same value"
            allowed = f"{ties}, as {TIED} beside it"
            yield Problem("tie-contradicts", f"config.json: {name}.{TIED}", repr(part[TIED]), allowed, remedy)
    if HEAD not in reader and not ties:
        value = f"missing, and config.json does not tie it ({TIED} = {config.get(TIED)!r})"
        tied = f"if it is the embedding, set {TIED}: true in the source's config.json and in model.architecture"
        yield Problem(
            "no-output-matrix", HEAD, value, "an output matrix", f"transformers fills it with random numbers; {tied}"
        )
    if choice == KEEP and HEAD in differing and arch.tie_word_embeddings:
        remedy = f"set model.architecture.{TIED}=false to train the file's {HEAD}, or model.patch.copies=drop"
        yield Problem(
            "copy-kept-while-tied", f"model.architecture.{TIED}", "true, with model.patch.copies=keep", "false", remedy
        )
    if choice == REJECT:
        for copy, copied in differing.items():
            value = f"differs from {copied} (in {reader.file_of(copy)} and {reader.file_of(copied)})"
            yield Problem("copy-differs", copy, value, f"the values of {copied}, or no such tensor", _readings(copy))


def _readings(copy: str) -> str:
    if copy == HEAD:
        return (
            "transformers 5 does not tie it and computes with the file's: for that set model.patch.copies=keep and "
            f"model.architecture.{TIED}=false; config.json ties it ({TIED}): for that set model.patch.copies=drop, "
            f"which leaves {HEAD} out, and model.architecture.{TIED}=true"
        )
    return (
        "the MTP layer has its own, which training leaves as it is: for that set model.patch.copies=keep; it shares "
        "the model's: for that set model.patch.copies=drop, which leaves it out"
    )


def _is_equal(reader: CheckpointReader, first: str, second: str) -> bool:
    if reader.info(first).spec != reader.info(second).spec:
        return True  # reported as a tensor of another shape or dtype
    with _at(reader, first) as ours, _at(reader, second) as theirs:
        left = reader.info(first).size_bytes
        while left:
            mine = ours.read(min(left, _READ_BYTES))
            if not mine or mine != theirs.read(len(mine)):
                return False
            left -= len(mine)
    return True


def _at(reader: CheckpointReader, name: str) -> BinaryIO:
    file = open(reader.folder / reader.file_of(name), "rb")  # noqa: SIM115, the caller closes it
    file.seek(reader.info(name).start)
    return file

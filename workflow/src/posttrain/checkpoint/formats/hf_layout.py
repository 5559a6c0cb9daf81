"""Checks that a folder is a complete checkpoint in Hub layout, from names, JSON and headers, without tensor data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.errors import CheckpointError, one_line
from posttrain.store import read_json

# At least one is required: tokenizers' file, SentencePiece's, tiktoken's, or a vocabulary.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


def check_layout(folder: Path) -> CheckpointReader:
    """Check that config, index and shards of a checkpoint agree.

    Args:
        folder: A folder in Hub layout.

    Returns:
        A reader of its tensors.

    Raises:
        CheckpointError: `config.json` is missing or not a JSON object; the index names a missing file, a truncated one
            (with both sizes), or a tensor that is not in its file; or it omits a tensor of a shard.
    """
    read_object(folder / "config.json")
    reader = CheckpointReader(folder)
    reader.require_all_named()
    return reader


def check_source(folder: Path) -> None:
    """Check an external checkpoint: its layout, its tokenizer, and that its JSON files are complete.

    Raises:
        CheckpointError: See `check_layout`; also lists unreadable JSON files.
    """
    wrong = []
    for path in sorted(folder.glob("*.json")):
        try:
            read_json(path)
        except ValueError as error:
            wrong.append(f"{one_line(path)}: not JSON ({error}), {path.stat().st_size} bytes")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        wrong.append(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}); put one of them there")
    if wrong:
        raise CheckpointError("files-missing", f"{folder}: not a whole checkpoint:\n  " + "\n  ".join(wrong))
    check_layout(folder)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        CheckpointError: The file is missing or has other content, a duplicate name or a non-finite number, which other
            readers interpret differently or reject.
    """
    try:
        content = read_json(path, is_strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            "file-missing", f"{path}: missing; is {path.parent} a checkpoint in Hub layout?"
        ) from error
    except ValueError as error:
        remedy = "remedy: correct it, or fetch the file again"
        raise CheckpointError(
            "json-invalid", f"{path}: not JSON ({error}), {path.stat().st_size} bytes\n  {remedy}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError("json-invalid", f"{path}: holds a {type(content).__name__}, expected an object")
    return content

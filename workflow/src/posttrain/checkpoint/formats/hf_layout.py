"""Checks that a folder is a whole checkpoint in Hub layout, from names, JSON and headers, not from tensor data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.errors import CheckpointError, one_line
from posttrain.store import read_json

# One of them: the tokenizers library's own file, SentencePiece's, tiktoken's, or a vocabulary.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")


def check_layout(folder: Path) -> CheckpointReader:
    """Check that config, index and shards of a checkpoint fit together.

    Args:
        folder: A folder in Hub layout.

    Returns:
        A reader of its tensors.

    Raises:
        CheckpointError: `config.json` is missing or no JSON object; the index names an absent file, a truncated one
            (both sizes are named), or a tensor that is not in the file named; or it does not name a tensor of a shard.
    """
    read_object(folder / "config.json")
    reader = CheckpointReader(folder)
    reader.require_all_named()
    return reader


def check_source(folder: Path) -> None:
    """Check a checkpoint that comes from outside: its layout, that it has a tokenizer, and that its JSON is whole.

    Raises:
        CheckpointError: See `check_layout`; also listing every JSON file that cannot be read.
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
        raise CheckpointError(f"{folder}: not a whole checkpoint:\n  " + "\n  ".join(wrong))
    check_layout(folder)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        CheckpointError: When it is missing or holds something else, a name twice or a number that is not finite, which
            other readers take for something else or reject.
    """
    try:
        content = read_json(path, is_strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; is {path.parent} a checkpoint in Hub layout?") from error
    except ValueError as error:
        remedy = "remedy: correct it, or fetch the file again"
        raise CheckpointError(f"{path}: not JSON ({error}), {path.stat().st_size} bytes\n  {remedy}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content

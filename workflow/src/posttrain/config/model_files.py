"""The user's files that replace the checkpoint's tokenizer and chat template."""

from __future__ import annotations

import hashlib
from pathlib import Path

from posttrain.config.schema import Model
from posttrain.errors import ConfigError, Problem

TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)


def read_model_files(model: Model) -> dict[str, bytes]:
    """Return the files that replace the checkpoint's: name in the checkpoint -> content.

    Raises:
        ConfigError: `model.tokenizer` has no tokenizer.json, or `model.chat_template` is not a text file.
    """
    files: dict[str, bytes] = {}
    if model.tokenizer:
        found = [name for name in TOKENIZER_FILES if (Path(model.tokenizer) / name).is_file()]
        if TOKENIZER not in found:
            raise _rejected("file-unreadable", "tokenizer", model.tokenizer, f"a folder with {TOKENIZER}")
        files = {name: (Path(model.tokenizer) / name).read_bytes() for name in found}
    if model.chat_template:
        try:
            files[CHAT_TEMPLATE] = Path(model.chat_template).read_bytes()
            files[CHAT_TEMPLATE].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise _rejected(
                "file-unreadable", "chat_template", f"{model.chat_template}: {error}", "a file with a Jinja template"
            ) from error
    return files


def model_digests(model: Model) -> tuple[list[str], list[Problem]]:
    """Return the digests that make these files part of the run's identity, and problems of the files."""
    try:
        files = read_model_files(model)
    except ConfigError as error:
        return [], list(error.problems)
    return [f"{name}:{hashlib.sha256(content).hexdigest()}" for name, content in files.items()], []


def _rejected(code: str, key: str, value: str, allowed: str) -> ConfigError:
    remedy = "correct the path, which is relative to the folder in which the workflow runs"
    return ConfigError([Problem(code, f"model.{key}", value, allowed, remedy)])

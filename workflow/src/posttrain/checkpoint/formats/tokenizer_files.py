"""The tokenizer of a patched copy: it has a chat template and loads, as its files specify, without remote code.

Some repositories have a `tiktoken.model` and their own class. Files of the classes in `TIKTOKEN_CLASSES`, which has
their patterns and reserved tokens, are converted. Others need `model.tokenizer`, a folder with a `tokenizer.json`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from posttrain.checkpoint.formats.config_patch import Change
from posttrain.config.model_files import TOKENIZER, TOKENIZER_CONFIG
from posttrain.errors import CheckpointError
from posttrain.store.plain_json import parse_json

TIKTOKEN = "tiktoken.model"
GENERIC_CLASS = "PreTrainedTokenizerFast"


@dataclass(frozen=True)
class TikTokenClass:
    """Description of a tokenizer class in a repository's own code.

    Args:
        pattern: Splits a text before byte pairs are merged.
        num_reserved: Token ids after the vocabulary's; those without a name are called `<|reserved_token_{id}|>`.
    """

    pattern: str
    num_reserved: int


# Moonlight, Kimi: `tokenization_moonshot.py` of moonshotai/Moonlight-16B-A3B-Instruct.
_UPPER, _LOWER = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"Lu}\p{Lt", "Ll"))
_WORD, _SHORT_FORM = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MOONSHOT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT_FORM}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_SHORT_FORM}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
TIKTOKEN_CLASSES = {"TikTokenTokenizer": TikTokenClass(_MOONSHOT, 258)}


class _Converter(TikTokenConverter):  # type: ignore[misc]
    """Reads the file without the package `tiktoken`."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_bytes().splitlines()
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def converted_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> bytes | None:
    """Return the `tokenizer.json` for a tiktoken.model of a known class; None for any other checkpoint.

    Args:
        folder: The checkpoint.
        config: Its tokenizer_config.json.
        vocab_size: Ids from here on are not tokens.

    Raises:
        CheckpointError: The file is not a tiktoken vocabulary.
    """
    known = TIKTOKEN_CLASSES.get(str(config.get("tokenizer_class")))
    if known is None or (folder / TOKENIZER).exists() or not (folder / TIKTOKEN).exists():
        return None
    try:
        first = len(_Converter.load_tiktoken_bpe(str(folder / TIKTOKEN)))
        named = {int(id): token["content"] for id, token in config.get("added_tokens_decoder", {}).items()}
        ids = range(first, min(first + known.num_reserved, vocab_size))
        special = [named.get(id, f"<|reserved_token_{id}|>") for id in ids]
        tokenizer = _Converter(str(folder / TIKTOKEN), pattern=known.pattern, extra_special_tokens=special).converted()
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "vocabulary-invalid", f"{folder / TIKTOKEN}: not a vocabulary of tiktoken ({error!r})"
        ) from error
    return tokenizer.to_str().encode()


def tokenizer_changes(config: Mapping[str, Any], tokenizer: bytes | None, has_template: bool) -> list[Change]:
    """Return the changes after which tokenizer_config.json loads without code, as tokenizer.json specifies.

    Args:
        config: Content of tokenizer_config.json.
        tokenizer: The tokenizer.json of the same folder, if any.
        has_template: A chat_template.jinja replaces its template.
    """
    dropped = ["auto_map", *(["chat_template"] if has_template else [])]
    changes = [Change("remove", f"/{key}", config[key], None) for key in dropped if key in config]
    named = config.get("tokenizer_class")
    if tokenizer and named and not _obeys(str(named), tokenizer):
        changes.append(Change("replace", "/tokenizer_class", named, GENERIC_CLASS))
    return changes


# Classes that take the vocabulary of a byte-level tokenizer.json and rebuild the rest as it is published.
_BYTE_LEVEL = ("Qwen2Tokenizer", "Qwen3_5Tokenizer")


def _obeys(name: str, tokenizer: bytes) -> bool:
    """Return whether a class is known to use such a tokenizer.json unchanged.

    In transformers 5, classes rebuild parts of the file: LlamaTokenizer replaces DeepSeek's byte-level
    pre-tokenizer with its own. Version 5.23 falls back to the generic class in that case; engines may have another.
    """
    found = tokenizer_class_from_name(name)
    is_byte_level = b'"ByteLevel"' in tokenizer and b'"BPE"' in tokenizer
    return found is tokenizer_class_from_name(GENERIC_CLASS) or (name.startswith(_BYTE_LEVEL) and is_byte_level)


def read_config(folder: Path, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the replacement's tokenizer_config.json, else the checkpoint's; {} without either.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    if TOKENIZER_CONFIG not in files and not (folder / TOKENIZER_CONFIG).exists():
        return {}
    try:
        text = files.get(TOKENIZER_CONFIG) or (folder / TOKENIZER_CONFIG).read_bytes()
        content = parse_json(text, unique_names=True, finite=True)
    except ValueError as error:
        raise CheckpointError("json-invalid", f"{TOKENIZER_CONFIG}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "json-invalid", f"{TOKENIZER_CONFIG}: holds a {type(content).__name__}, expected an object"
        )
    return content

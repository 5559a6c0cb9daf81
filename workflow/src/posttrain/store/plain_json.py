"""Parses untrusted JSON: every fault is a ValueError with a reason.

Python's parser raises other errors, too (nested too deeply), and accepts lone surrogates, which fail only later, when
they are written as UTF-8.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from posttrain.store.placeholders import placeholder

# The escape of a surrogate; the encoder finds out whether its partner follows.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, unique_names: bool = False, finite: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        text: The text, or its bytes in UTF-8.
        unique_names: Reject objects with duplicate names; Python's parser would keep the last.
        finite: Reject NaN and infinity, which are not JSON but accepted by Python's parser.

    Raises:
        ValueError: The text is not UTF-8 or not JSON, is nested too deeply, or contains a lone surrogate.
    """
    hooks: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        content = json.loads(decoded, object_pairs_hook=_object_of if unique_names else None, **hooks)
        if _HALF.search(decoded):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start]
        raise ValueError(f"holds half a character, {half.encode('unicode_escape').decode()}") from error
    return content


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has {next(name for name in names if names.count(name) > 1)!r} twice")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"holds {text}, which is no finite number")
    return number


def read_json(path: Path, is_strict: bool = False) -> Any:
    """Parse a JSON file.

    Args:
        path: The file.
        is_strict: Reject duplicate names and numbers that are not finite; see `parse_json`.

    Raises:
        OSError: The file cannot be read.
        ValueError: See `parse_json`.
    """
    try:
        return parse_json(path.read_bytes(), unique_names=is_strict, finite=is_strict)
    except ValueError as error:
        if instead := placeholder(path):
            raise ValueError(instead) from error
        raise

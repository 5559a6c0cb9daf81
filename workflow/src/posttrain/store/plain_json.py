"""JSON that anybody may have written: whatever is wrong with it is a ValueError with a reason.

Python's own reader raises other errors, too (nested too deeply), and accepts half of a surrogate pair as text, which
would fail only where it is written as UTF-8.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from posttrain.store.placeholders import placeholder

# The escape of half a character; whether its other half follows is left to the encoder.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, unique_names: bool = False, finite: bool = False) -> Any:
    """Parse a JSON text.

    Args:
        text: The text, or its bytes in UTF-8.
        unique_names: Reject objects that have a name twice, of which Python's reader takes the last.
        finite: Reject NaN and infinite numbers, which JSON does not have and Python's reader takes.

    Raises:
        ValueError: It is not UTF-8 or not JSON, is nested too deeply, or holds half a character (a lone surrogate).
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
        is_strict: Each name once, and finite numbers alone; see `parse_json`.

    Raises:
        OSError: It cannot be read.
        ValueError: See `parse_json`.
    """
    try:
        return parse_json(path.read_bytes(), unique_names=is_strict, finite=is_strict)
    except ValueError as error:
        if instead := placeholder(path):
            raise ValueError(instead) from error
        raise

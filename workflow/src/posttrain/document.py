"""Declares fields of the configuration.

Besides a range (`minimum`, `exclusive_minimum`, `maximum`) or `choices`, a field may have

- `unnamed`: the value with which the field is left out of the experiment, so that older runs keep their names
- `used_by`: {key of a part: its values that use this field}; with any other value of that key the field is rejected
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING

# `unnamed` for every value.
ANY = object()


def _doc(text: str, default: Any = MISSING, **limits: Any) -> Any:
    """Declare a field with its description and the range or choices that `validate` enforces."""
    metadata = {"doc": text, **limits}
    if isinstance(default, list):
        # A list has no hash, and sections are keys of caches; equality compares it all the same.
        return field(default_factory=lambda: list(default), hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)

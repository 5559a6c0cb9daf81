"""How a field of the configuration is declared.

Besides a range (`minimum`, `exclusive_minimum`, `maximum`) or `choices`, a field may have

- `unnamed`: a value with which it is left out of the experiment, so that runs from before the key keep their names
- `used_by`: {key of a part: its values that use this one}; set beside another, it is refused
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING

# As `unnamed`: whatever the value is.
ANY = object()


def _doc(text: str, default: Any = MISSING, **limits: Any) -> Any:
    """Declare a field with its description and, as metadata, the range or choices that `validate` enforces."""
    metadata = {"doc": text, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)

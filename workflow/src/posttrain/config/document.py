"""How a field of the schema is declared."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING


def _doc(text: str, default: Any = MISSING, **limits: Any) -> Any:
    """Declare a field with its description and, as metadata, the range or choices that `validate` enforces."""
    metadata = {"doc": text, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)

"""A pickle that runs code when it is loaded: it makes a folder, by which is seen that it ran."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Payload:
    """What is planted.

    Args:
        marker: The folder that appears when it runs.
    """

    marker: Path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)

    @property
    def content(self) -> bytes:
        """The pickle."""
        return pickle.dumps(self)

    @property
    def has_run(self) -> bool:
        """Somebody has loaded it."""
        return self.marker.exists()

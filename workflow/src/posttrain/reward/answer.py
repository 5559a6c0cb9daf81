"""What crosses the border of the process that grades."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    text: str
    label: Any = None
    prompt: tuple[Mapping[str, str], ...] = ()
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    is_truncated: bool = False
    is_chat: bool = True


@dataclass(frozen=True)
class Grade:
    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)

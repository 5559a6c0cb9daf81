"""What goes into the process that grades, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a grader sees of one response.

    Args:
        text: Decoded, without the end token.
        label: Of any JSON type; None where the source has none.
        prompt: Chat messages.
        source: Name of the data's source, "" where there is one.
        columns: The row's other columns.
        num_tokens: Its length.
        is_truncated: It was cut at the longest allowed length.
        is_chat: The row's prompt is chat messages, not a text.
    """

    text: str
    label: Any = None
    prompt: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    is_truncated: bool = False
    is_chat: bool = True


@dataclass(frozen=True)
class Grade:
    """What a grader says of one response.

    Args:
        score: None where it does not apply, which is not 0.
        parts: Further numbers, which become metrics.
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a response has no grade.

    Args:
        kind: "deadline", "crash" (the process died) or "error" (it raised).
        reason: In words.
    """

    kind: str
    reason: str

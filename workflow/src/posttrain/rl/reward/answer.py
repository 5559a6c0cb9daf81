"""The types between graders and the trainer: a response's text, and its grade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One response, as a grader sees it.

    Args:
        text: Decoded, without the end token.
        label: Any JSON value; None where the source has none.
        prompt: The chat messages that were asked.
        source: Name of the data's source.
        columns: The other columns of the row.
        num_tokens: Length of the response in tokens, the end token included.
        is_truncated: It was cut at the longest allowed length.
        is_chat: The row has its prompt as chat messages, not as a text.
    """

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
    """A grader's result for one answer.

    Args:
        score: None where the grader does not apply to this answer, which is not 0.
        parts: Further numbers by name; they become metrics.
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why there is no grade.

    Args:
        kind: "deadline" (not answered in time), "crash" (the worker died or had no memory left), "connection" (tried as
            often as allowed, and not answered), "error" (raised, or answered with something else than a grade).
        reason: For a reader.
    """

    kind: str
    reason: str

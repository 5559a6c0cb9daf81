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
        prompt: The prompt as chat messages.
        source: Name of the data's source.
        columns: The other columns of the row.
        num_tokens: Length of the response in tokens, including the end token.
        is_truncated: The response reached the length limit.
        is_chat: The row's prompt is chat messages, not text.
        environment: The environment's grade of the episode that ends with the response; None without one.
    """

    text: str
    label: Any = None
    prompt: tuple[Mapping[str, str], ...] = ()
    source: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    is_truncated: bool = False
    is_chat: bool = True
    environment: Grade | Failure | None = None


@dataclass(frozen=True)
class Grade:
    """A grader's result for one answer.

    Args:
        score: None if the grader does not apply to this answer, which differs from 0.
        parts: Further values by name, logged as metrics.
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Reason for a missing grade.

    Args:
        kind: "deadline" (no answer in time), "crash" (the worker died or ran out of memory), "connection" (no answer
            after all retries), "sandbox" (none can run), "error" (an exception, or an answer that is not a grade).
        reason: Human-readable reason.
    """

    kind: str
    reason: str

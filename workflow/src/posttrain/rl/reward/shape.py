"""Graders of a response's format: tags, length and repetition. None of them needs a label."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.rl.reward.answer import Answer

_THINK_THEN_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


@dataclass(frozen=True)
class ShapeSettings:
    """Settings of the format graders.

    Args:
        format_pattern: Regular expression for the whole response; a dot matches any character.
        target_tokens: The ideal response length in tokens.
        max_tokens: Length in tokens at which `overlong` reaches its full penalty.
        overlong_buffer_tokens: Tokens below `max_tokens` at which the penalty begins.
        repetition_ngram: n-gram length in words.

    Raises:
        ValueError: A number is not positive.
    """

    format_pattern: str = _THINK_THEN_ANSWER
    target_tokens: int = 1024
    max_tokens: int = 16384
    overlong_buffer_tokens: int = 4096
    repetition_ngram: int = 4

    def __post_init__(self) -> None:
        for name in ("target_tokens", "max_tokens", "overlong_buffer_tokens", "repetition_ngram"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.overlong_buffer_tokens > self.max_tokens:
            raise ValueError(f"overlong_buffer_tokens={self.overlong_buffer_tokens} exceeds {self.max_tokens}")


def format_tags(answer: Answer, settings: ShapeSettings) -> float:
    """Return 1.0 if the whole response matches `format_pattern`, 0.0 otherwise or if truncated."""
    matches = re.fullmatch(settings.format_pattern, answer.text, re.DOTALL)
    return float(matches is not None and not answer.is_truncated)


def length(answer: Answer, settings: ShapeSettings) -> float:
    """Return 1.0 at `target_tokens`, falling linearly to 0.0 at zero tokens and at twice the target."""
    return max(0.0, 1 - abs(answer.num_tokens - settings.target_tokens) / settings.target_tokens)


def overlong(answer: Answer, settings: ShapeSettings) -> float:
    """Return DAPO's soft overlong penalty (Yu et al. 2025, arXiv:2503.14476, equation 13).

    0.0 up to `max_tokens` less the buffer, then linear down to -1.0 at `max_tokens`, and -1.0 beyond.
    """
    excess = answer.num_tokens - (settings.max_tokens - settings.overlong_buffer_tokens)
    return -min(1.0, max(0.0, excess / settings.overlong_buffer_tokens)) or 0.0


def repetition(answer: Answer, settings: ShapeSettings) -> float:
    """Return minus the share of repeated n-grams of `repetition_ngram` words, -1.0 to 0.0."""
    words, size = answer.text.lower().split(), settings.repetition_ngram
    pieces = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(pieces)) / len(pieces) - 1 if pieces else 0.0

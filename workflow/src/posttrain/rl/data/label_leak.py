"""Detects labels that are contained in their own prompts, which a model would learn to copy.

Many prompts contain a short label by chance, and every multiple-choice prompt contains its letter. That also holds for
other rows' labels, so the measure is how much more often a prompt contains its own label than another's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.errors import Problem
from posttrain.types import Prompt

# Labels to search for; and the share and the number of rows above which leaks are no coincidence.
NUM_LOOKED_AT, SUSPICIOUS_SHARE, MIN_ROWS = 1000, 0.2, 8


def check_leak(key: str, prompts: Sequence[Prompt], most: float) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that refuse a run, and notes.

    Args:
        key: Setting of the labels' column, for messages.
        prompts: Prompts of one source.
        most: `reward.max_label_in_prompt`.
    """
    labelled = [(prompt, texts) for prompt in prompts if (texts := list(_texts_of(prompt.label)))]
    stride = max(1, len(labelled) // NUM_LOOKED_AT)
    looked_at = labelled[::stride][:NUM_LOOKED_AT]
    inside, other = [], 0
    for place, (prompt, texts) in enumerate(looked_at):
        asked = _squeezed(" ".join(str(m.get("content") or "") for m in prompt.messages if m["role"] != "system"))
        if any(_is_in(text, asked) for text in texts):
            inside.append(prompt)
        # If all labels are equal, own and other labels count the same.
        others = (looked_at[(place + step) % len(looked_at)][1] for step in range(1, len(looked_at)))
        other += any(_is_in(text, asked) for text in next((some for some in others if some != texts), texts))
    excess = (len(inside) - other) / max(1, len(looked_at))
    if excess <= min(SUSPICIOUS_SHARE, most):
        return [], []
    value = (
        f"is in its own prompt in {len(inside)} of {len(looked_at)} rows that were looked at, first in row "
        f"{inside[0].prompt_id + 1}, and another row's label in {other}"
    )
    remedy = (
        "take the answer out of the prompt, such as by data.prompt_key=messages[:-1] where it is the last message; if "
        "the task is to find it there, set reward.max_label_in_prompt=1"
    )
    allowed = f"at most {most:.0%} more often its own than another's (reward.max_label_in_prompt)"
    problem = Problem("label-in-prompt", key, value, allowed, remedy)
    return ([problem], []) if excess > most and len(inside) >= MIN_ROWS else ([], [problem])


def _texts_of(label: Any) -> Iterator[str]:
    """Yield the strings and numbers in a label, as text."""
    if isinstance(label, dict):
        # Only the content of messages.
        label = label.get("content") if "role" in label else list(label.values())
    if isinstance(label, list):
        for item in label:
            yield from _texts_of(item)
    elif isinstance(label, str | int | float) and not isinstance(label, bool) and (text := _squeezed(str(label))):
        yield text


def _squeezed(text: str) -> str:
    return " ".join(text.split()).casefold()


def _is_in(label: str, text: str) -> bool:
    """Return whether a text contains a label as a whole word or number."""
    before = r"(?<!\w)(?<!\d[.,])" if label[0].isascii() and label[0].isalnum() else ""
    after = r"(?!\w)(?![.,]\d)" if label[-1].isascii() and label[-1].isalnum() else ""
    return label in text and re.search(before + re.escape(label) + after, text) is not None

"""Finds prompts over a run's length limit before training, with the run's tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.rollout import Rollout
from posttrain.errors import Problem
from posttrain.store.plain_json import read_json
from posttrain.types import Prompt

# In the result of `approve_data`.
LEFT_OUT = "left_out"


@dataclass(frozen=True)
class PromptLengths:
    """Tokens of all prompts of a run.

    Args:
        prompts: At least one prompt.
        lengths: Token count of each.
        limit: `rollout.max_prompt_tokens`; 0: no limit.
    """

    prompts: Sequence[Prompt]
    lengths: Sequence[int]
    limit: int

    @property
    def summary(self) -> tuple[int, int, int]:
        """Shortest, median and longest."""
        in_order = sorted(self.lengths)
        return in_order[0], in_order[len(in_order) // 2], in_order[-1]

    @property
    def too_long(self) -> list[int]:
        """`prompt_id` of each prompt over the limit."""
        places = zip(self.prompts, self.lengths, strict=True)
        return [prompt.prompt_id for prompt, length in places if 0 < self.limit < length]


def check_lengths(found: PromptLengths, rollout: Rollout) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that refuse a run, and notes."""
    longer = set(found.too_long)
    if not longer:
        return [], []
    share = f"{len(longer)} of {len(found.lengths)} prompts ({len(longer) / len(found.lengths):.1%})"
    value = f"{found.limit}, and {share} are longer; the longest has {max(found.lengths)} tokens"
    key, allowed = "rollout.max_prompt_tokens", "as many as the longest prompt has"
    if rollout.overlong_prompts == "refuse":
        remedy = "raise it, or leave such prompts out with rollout.overlong_prompts=drop"
        return [Problem("prompts-too-long", key, value, allowed, remedy)], []
    left = Counter(prompt.source for prompt in found.prompts if prompt.prompt_id not in longer)
    empty = sorted({prompt.source for prompt in found.prompts} - left.keys())
    if empty:
        of = f" of {', '.join(empty)}" if any(empty) else ""
        return [
            Problem("prompts-too-long", key, f"{value}: none{of} is left", allowed, "raise it, or shorten the prompts")
        ], []
    return [], [
        Problem("prompts-left-out", key, value, allowed, "they are not trained on: rollout.overlong_prompts=drop")
    ]


def read_left_out(data_check: Path) -> frozenset[int]:
    """Return `prompt_id` of the prompts that `approve_data` has found too long to be trained on."""
    return frozenset(read_json(data_check)[LEFT_OUT])

"""Prompts of a serving benchmark: random tokens, all different, or prompts of a file in turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError, Problem
from posttrain.rl.engines.streaming import CHAT, Prompt
from posttrain_serving.benchmark.serving import PromptOf


def random_prompts(input_tokens: int, vocabulary: int, seed: int) -> PromptOf:
    """Return prompts of random token ids in [0, vocabulary), each a function of seed, row and request number."""

    def prompt_of(row: int, number: int) -> Prompt:
        drawn = np.random.default_rng((seed, row, number)).integers(0, vocabulary, input_tokens)
        return [int(token) for token in drawn]

    return prompt_of


def given_prompts(prompts: Sequence[Prompt], seed: int) -> PromptOf:
    """Return prompts of a list in an order shuffled by the seed; each row starts one prompt later and wraps around."""
    order = np.random.default_rng(seed).permutation(len(prompts))

    def prompt_of(row: int, number: int) -> Prompt:
        return prompts[order[(row + number) % len(prompts)]]

    return prompt_of


def read_prompts(path: Path, api: str) -> list[Prompt]:
    """Read prompts from lines of JSON or a JSON list.

    A row has `prompt` or `messages` (a text, or messages with role and content), or ShareGPT's `conversations`, whose
    first turn is used.

    Args:
        path: The file.
        api: API of the endpoint: `CHAT` uses messages, others text.

    Raises:
        ConfigError: The file has another format, or has conversations where text is needed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        return [_prompt(row, api) for row in rows] or _refuse(path, "no rows")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        return _refuse(path, f"{type(error).__name__}: {error}")


def _prompt(row: Mapping[str, Any], api: str) -> Prompt:
    found = row.get("messages") or row.get("prompt") or row["conversations"][0]["value"]
    if isinstance(found, str):
        return [{"role": "user", "content": found}] if api == CHAT else found
    if api == CHAT:
        return [{"role": message["role"], "content": message["content"]} for message in found]
    (message,) = found  # the chat template for several messages is known only to the endpoint
    return str(message["content"])


def _refuse(path: Path, found: str) -> list[Prompt]:
    allowed = "rows with `prompt`, `messages` or `conversations`; without --chat, of one text each"
    raise ConfigError(
        [Problem("prompts-unreadable", "--dataset", f"{path}: {found}", allowed, "correct the file, or leave it out")]
    )

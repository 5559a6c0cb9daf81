"""Reads and writes prepared prompts: JSON lines with fixed columns."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.raw_rows import read_raw
from posttrain.store import write_atomic
from posttrain.types import Prompt


def load_prompts(path: Path, left_out: Container[int] = ()) -> list[Prompt]:
    """Read the prompts that `write_prompts` wrote.

    Args:
        path: `train.jsonl` or `heldout.jsonl` of a dataset.
        left_out: `prompt_id` of prompts to skip.

    Returns:
        The prompts in file order; `prompt_id` is the index, from 0.

    Raises:
        ConfigError: The file is not a prepared dataset.
    """
    prompts: list[Prompt] = []
    for row in read_raw(path):
        try:
            prompts.append(_prompt(len(prompts), row.content or {}))
        except (KeyError, TypeError) as error:
            raise ConfigError([_not_ours(path, f"{row.place}: {row.reason or error}")]) from error
    if not prompts:
        raise ConfigError([_not_ours(path, "no prompts")])
    return [prompt for prompt in prompts if prompt.prompt_id not in left_out]


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts durably: `prompt`, `label`, and `source`, `columns` and `tools` if not empty."""
    # Line by line, to avoid a second copy of everything in memory.
    write_atomic(path, lambda file: file.writelines(map(_line, prompts)))


def _line(prompt: Prompt) -> bytes:
    row = prompt.as_dict()
    del row["prompt_id"]
    return (json.dumps({"prompt": row.pop("messages"), **row}, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _prompt(prompt_id: int, row: dict[str, Any]) -> Prompt:
    others = {name: value for name, value in row.items() if name != "prompt"}
    return Prompt.from_dict({"prompt_id": prompt_id, "messages": row["prompt"], **others})


def _not_ours(path: Path, value: str) -> Problem:
    remedy = "delete the folder, then run again"
    return Problem("not-our-dataset", str(path), value, "the lines that download_dataset wrote", remedy)

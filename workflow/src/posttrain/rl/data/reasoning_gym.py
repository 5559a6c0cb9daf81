"""Rows that a task of reasoning-gym generates.

Row number i of a task follows from its name, its parameters, the seed and i, and from the version of the package. Which
rows are held out is a property of the question, not of a draw: the first byte of its SHA-256 says so for a fifth of
them, whatever the seed and the counts. So training, and the warm-up of a made model, stay off what any evaluation asks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from posttrain.config.data import Data
from posttrain.config.tasks import PACKAGE, load_task
from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.dataset_formats import OWN
from posttrain.rl.data.raw_rows import RawRow
from posttrain.rl.data.reading import Reading
from posttrain.rl.data.rows import Row, RowReader

HELDOUT_SHARE = 0.2
# Rows that are looked at, for each one that is wanted and at least: then the task has no more questions.
_MOST_DRAWS, _LEAST_DRAWS = 20, 2_000


def generate_rows(data: Data, reading: Reading) -> tuple[list[Row], list[Row]]:
    """Return rows to train on and rows held out, no question twice.

    Args:
        data: The configuration's section, or that of one source.
        reading: With what is put around a question.

    Returns:
        Both sides. A label is the task's answer; the columns are what grading asks for: `task`, with name, parameters
        and version, and `entry`, the task's own row.

    Raises:
        ConfigError: The task has not that many questions, or rows without an answer.
        RuntimeError: Another version is installed than the one that was planned with.
    """
    task = {"name": data.task, "parameters": list(data.task_parameters), "version": data.reasoning_gym}
    reader = RowReader(OWN, reading)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for entry, is_held_out in draw_entries(data):
        content = {"prompt": entry["question"], "label": entry["answer"], "task": task, "entry": entry}
        row = reader.read(RawRow(f"row {entry['metadata'].get('source_index')}", content), f"{data.task}, ")
        if not isinstance(row, Row):
            reason = row if isinstance(row, str) else f"{row.place}: {row.reason}"
            remedy = "take another task: rows without an answer cannot be checked before training"
            raise ConfigError([Problem("data.task", data.task, f"a task whose rows have an answer ({reason})", remedy)])
        # A text of one side would be messages on the other, where a template is put around them.
        sides[is_held_out].append(dataclasses.replace(row, is_text=False))
    return sides


def draw_entries(data: Data) -> list[tuple[dict[str, Any], bool]]:
    """Return the task's own rows in JSON's types, each with whether it is held out; as many of each as are wanted."""
    _require_version(data.reasoning_gym)
    wanted = [data.num_train_prompts, data.num_heldout_prompts]
    draws = max(_LEAST_DRAWS, _MOST_DRAWS * sum(wanted))
    task = load_task(data.task, tuple(data.task_parameters), seed=data.seed, size=draws)
    found: list[tuple[dict[str, Any], bool]] = []
    seen: set[str] = set()
    for place in range(draws):
        # What grades has read it from a file, so nothing may get lost on the way there.
        entry = json.loads(json.dumps(task[place]))
        held_out = is_heldout(entry["question"])
        if wanted[held_out] and entry["question"] not in seen:
            seen.add(entry["question"])
            wanted[held_out] -= 1
            found.append((entry, held_out))
            if not any(wanted):
                return found
    raise ConfigError([_too_few(data, wanted, draws)])


def is_heldout(question: str) -> bool:
    """Return whether a question belongs to evaluation."""
    return hashlib.sha256(question.encode()).digest()[0] < HELDOUT_SHARE * 256


def _require_version(planned: str) -> None:
    installed = importlib.metadata.version(PACKAGE)
    if installed != planned:
        raise RuntimeError(f"{PACKAGE} {installed} is installed here, and {planned} was planned with; install that one")


def _too_few(data: Data, missing: Sequence[int], draws: int) -> Problem:
    key, asked, more = max(
        ("data.num_train_prompts", data.num_train_prompts, missing[0]),
        ("data.num_heldout_prompts", data.num_heldout_prompts, missing[1]),
        key=lambda one: one[2],
    )
    allowed = f"at most {asked - more}: {draws:,} rows of {data.task} have no more questions that differ"
    return Problem(key, str(asked), allowed, "ask for fewer, or widen data.task_parameters")

"""Generates rows with a reasoning-gym task.

Row i of a task is determined by its name, its parameters, the seed, i, and the package version. Whether a row is held
out depends only on its question: the first byte of the question's SHA-256 selects a fifth of them, whatever the seed
and the counts. So training, and the warm-up of a generated model, never use a question of any evaluation.
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
    """Return training rows and held-out rows, without duplicate questions.

    Args:
        data: The configuration's section, or that of one source.
        reading: System prompt and template for the questions.

    Returns:
        Both sides. A label is the task's answer; the columns are what grading asks for: `task`, with name, parameters
        and version, and `entry`, the task's own row.

    Raises:
        ConfigError: The task has too few questions, or rows without an answer.
        RuntimeError: The installed version differs from the planned one.
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
            allowed = f"a task whose rows have an answer ({reason})"
            raise ConfigError([Problem("task-without-answers", "data.task", data.task, allowed, remedy)])
        # A text of one side would be messages on the other, where a template is put around them.
        sides[is_held_out].append(dataclasses.replace(row, is_text=False))
    return sides


def draw_entries(data: Data) -> list[tuple[dict[str, Any], bool]]:
    """Return the task's rows in JSON types with a held-out flag, as many of each side as requested."""
    _require_version(data.reasoning_gym)
    wanted = [data.num_train_prompts, data.num_heldout_prompts]
    draws = max(_LEAST_DRAWS, _MOST_DRAWS * sum(wanted))
    task = load_task(data.task, tuple(data.task_parameters), seed=data.seed, size=draws)
    found: list[tuple[dict[str, Any], bool]] = []
    seen: set[str] = set()
    for place in range(draws):
        # The grader reads rows from a file, so they must survive a JSON round trip.
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
    """Return whether a question is held out."""
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
    return Problem("too-few-questions", key, str(asked), allowed, "ask for fewer, or widen data.task_parameters")

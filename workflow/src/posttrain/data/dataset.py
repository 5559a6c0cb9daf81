"""Prompts from JSON lines, checked as a whole, and the order in which a run takes them.

The order has no state but a cursor: prompt number c of a run is place c mod N of the shuffle of epoch c // N,
and the shuffle of an epoch follows from the seed and the epoch's number alone. So a resumed run goes on where
it was, whatever else drew random numbers in between.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.artifacts import parse_json
from posttrain.errors import ConfigError, Problem
from posttrain.types import Prompt

log = logging.getLogger(__name__)
# All of one kind of mistake are told by the first ones; a file may have millions of lines.
MAX_REPORTED_LINES = 50


@dataclass(frozen=True)
class BadLine:
    """One wrong line of a dataset.

    Args:
        number: Counted from 1.
        reason: What is wrong with it.
    """

    number: int
    reason: str


def load_prompts(path: Path, prompt_key: str, label_key: str) -> list[Prompt]:
    """Read and check a dataset.

    Args:
        path: JSON lines, each an object; empty lines do not count.
        prompt_key: Column with the prompt: chat messages, or text that becomes one user message.
        label_key: Column with the label, a text.

    Returns:
        The prompts in the file's order; `prompt_id` is the place, from 0.

    Raises:
        ConfigError: Listing every line that is not JSON, lacks prompt or label, has one of the wrong type, or
            repeats the prompt of another line.
    """
    checked = check_prompts(path, prompt_key, label_key)
    if checked.bad or not checked.prompts:
        raise ConfigError([describe_bad_lines(checked, prompt_key, label_key)])
    return checked.prompts


@dataclass(frozen=True)
class CheckedFile:
    """What was found in a dataset's file.

    Args:
        path: The file.
        prompts: Of its right lines, in order.
        bad: Its wrong lines, in order.
    """

    path: Path
    prompts: list[Prompt]
    bad: list[BadLine]


def check_prompts(path: Path, prompt_key: str, label_key: str) -> CheckedFile:
    """Read a file and check every line; see `load_prompts`.

    Raises:
        ConfigError: The file cannot be read.
    """
    prompts, bad = parse_prompts(_read_lines(path), prompt_key, label_key)
    log.info("%s: %d prompts, %d wrong lines", path, len(prompts), len(bad))
    return CheckedFile(path, prompts, bad)


def parse_prompts(lines: Sequence[bytes], prompt_key: str, label_key: str) -> tuple[list[Prompt], list[BadLine]]:
    """Return the prompts of all right lines and what is wrong with the others; see `load_prompts`."""
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row, reason = _parse_line(line, prompt_key, label_key)
        if row is not None:
            key = json.dumps(row[0], sort_keys=True)
            earlier = first_seen.setdefault(key, number)
            reason = f"the same prompt as line {earlier}" if earlier != number else ""
        if reason:
            bad.append(BadLine(number, reason))
        elif row is not None:
            prompts.append(Prompt(len(prompts), *row))
    return prompts, bad


def describe_bad_lines(checked: CheckedFile, prompt_key: str, label_key: str, report: Path | None = None) -> Problem:
    """Return one problem that lists the bad lines, the first `MAX_REPORTED_LINES` of them in full.

    Args:
        checked: The file.
        prompt_key: Column with the prompt.
        label_key: Column with the label.
        report: A file that lists all of them.
    """
    bad, num_lines = checked.bad, len(checked.prompts) + len(checked.bad)
    listed = "".join(f"\n        line {line.number}: {line.reason}" for line in bad[:MAX_REPORTED_LINES])
    num_more = len(bad) - MAX_REPORTED_LINES
    more = f"\n        and {num_more} more{f', all of them in {report}' if report else ''}" if num_more > 0 else ""
    value = f"{len(bad)} of {num_lines} lines are wrong:{listed}{more}" if bad else "no prompts"
    allowed = f"one JSON object a line: {prompt_key!r} (messages or text), {label_key!r} (text), no prompt twice"
    return Problem(str(checked.path), value, allowed, "mend these lines, or set data.prompt_key and data.label_key")


class PromptOrder:
    """Which prompts a step takes.

    Args:
        num_prompts: Size of the dataset, N.
        seed: Of the shuffles.

    Example:
        With 3 prompts and a step of 2, the steps start at cursors 0, 2, 4: the first takes two prompts of
        epoch 0, the second the last one of epoch 0 and the first of epoch 1.
    """

    def __init__(self, num_prompts: int, seed: int):
        assert num_prompts > 0, "an order needs prompts"
        self._num_prompts, self._seed = num_prompts, seed
        self._shuffle: Callable[[int], tuple[int, ...]] = lru_cache(maxsize=2)(self._shuffle_epoch)

    def take(self, start: int, count: int) -> list[int]:
        """Return the places of `count` prompts in the dataset.

        Args:
            start: The cursor: how many prompts the run took before. Afterwards it is `start + count`.
            count: How many; more than the dataset has are taken from as many epochs as needed.
        """
        assert start >= 0 <= count, f"start {start}, count {count}"
        epochs = (divmod(cursor, self._num_prompts) for cursor in range(start, start + count))
        return [self._shuffle(epoch)[place] for epoch, place in epochs]

    def _shuffle_epoch(self, epoch: int) -> tuple[int, ...]:
        # A text seed goes through SHA-512, so neighbouring seeds and epochs are unrelated.
        places = list(range(self._num_prompts))
        random.Random(f"prompt order, seed {self._seed}, epoch {epoch}").shuffle(places)
        return tuple(places)


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        problem = Problem("data", str(path), "a readable file of JSON lines", f"check the path: {error}")
        raise ConfigError([problem]) from error


def _parse_line(
    line: bytes, prompt_key: str, label_key: str
) -> tuple[tuple[tuple[dict[str, str], ...], str] | None, str]:
    """Return messages and label of a line, or None and the reason."""
    try:
        row = parse_json(line)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 ({error.reason} at byte {error.start})"
    except ValueError as error:
        return None, f"not JSON ({error})"
    if not isinstance(row, dict):
        return None, f"a {type(row).__name__}, expected an object"
    reasons = [*_check_prompt(row, prompt_key), *_check_label(row, label_key)]
    if reasons:
        return None, "; ".join(reasons)
    prompt = row[prompt_key]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return (tuple({"role": m["role"], "content": m["content"]} for m in messages), row[label_key]), ""


def _check_prompt(row: Mapping[str, Any], key: str) -> Iterator[str]:
    prompt = row.get(key)
    if prompt is None:
        yield f"{key!r} is missing"
    elif not isinstance(prompt, str | list):
        yield f"{key!r} is a {type(prompt).__name__}, expected messages or text"
    elif not prompt or (isinstance(prompt, str) and not prompt.strip()):
        yield f"{key!r} is empty"
    elif isinstance(prompt, list) and not all(map(_is_message, prompt)):
        yield f"{key!r} must hold messages with the texts 'role' and 'content'"


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return all(isinstance(message.get(key), str) and message[key].strip() for key in ("role", "content"))


def _check_label(row: Mapping[str, Any], key: str) -> Iterator[str]:
    label = row.get(key)
    if label is None:
        yield f"{key!r} is missing"
    elif not isinstance(label, str):
        yield f"{key!r} is a {type(label).__name__}, expected text"
    elif not label.strip():
        yield f"{key!r} is empty"

"""Tasks of reasoning-gym, by name and parameters: `data.task` and `data.task_parameters`.

The package is an extra and takes a second to import, so it is imported only if a source needs it. Its own configuration
of the task then validates the parameters, before anything starts.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import typing
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

from posttrain.config.data import Data, sources_of
from posttrain.config.fields import did_you_mean
from posttrain.errors import ConfigError, Problem

PACKAGE = "reasoning-gym"
REMEDY = "pip install 'posttrain[reasoning-gym]'"
# Tasks that evaluate a model's output as Python code, directly or with sympy.
EVALUATE = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)
# Parameters that the workflow sets.
OURS = {"seed": "data.seed", "size": "data.num_train_prompts and data.num_heldout_prompts"}


def installed_version(data: Data) -> tuple[str, list[Problem]]:
    """Return the installed version ("" if no source needs the package) and the problems of the tasks.

    Another version may generate other rows for the same task, so the version is part of a dataset's identity.
    """
    problems: list[Problem] = []
    sources = {name: source for name, source in sources_of(data).items() if source.kind == "reasoning_gym"}
    if not sources:
        return "", problems
    try:
        version = importlib.metadata.version(PACKAGE)
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        key = "data.kind" if "" in sources else f"data.sources.{next(iter(sources))}.kind"
        return "", [
            Problem("package-missing", key, "reasoning_gym", f"a kind whose package is installed ({error})", REMEDY)
        ]
    for name, source in sources.items():
        section = f"data.sources.{name}" if name else "data"
        if source.task in EVALUATE and not data.runs_responses:
            allowed = "a task that executes no response: this one evaluates responses as Python, without a sandbox"
            remedy = "take another task, or set data.runs_responses=true where workers may run a model's code"
            problems.append(Problem("task-runs-responses", f"{section}.task", repr(source.task), allowed, remedy))
        try:
            load_task(source.task, tuple(source.task_parameters), section)
        except ConfigError as error:
            problems += error.problems
    return version, problems


@lru_cache
def load_task(name: str, words: tuple[str, ...], section: str = "data", seed: int = 0, size: int = 1) -> Any:
    """Return a task of reasoning-gym.

    Args:
        name: Name of the task.
        words: Its parameters, each `NAME=VALUE`.
        section: Configuration section of both, for the message.
        seed: Seed of the rows; not needed for grading.
        size: Number of rows; a few tasks draw numbers for all rows in advance.

    Returns:
        The task's `ProceduralDataset`: `[i]` is a row with question, answer and metadata, and `score_answer` grades.

    Raises:
        ConfigError: The task does not exist, or does not accept these parameters.
    """
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        allowed = f"one of the {len(DATASETS)} tasks of {PACKAGE}"
        remedy = did_you_mean(name, DATASETS) or f"choose one: {', '.join(sorted(DATASETS))}"
        raise ConfigError([Problem("unknown-task", f"{section}.task", repr(name), allowed, remedy)])
    make, config_class = DATASETS[name]
    given = _parameters(name, words, config_class, f"{section}.task_parameters")
    try:
        config = config_class(**given, seed=seed, size=size)
        # Two tasks have nothing to validate.
        getattr(config, "validate", lambda: None)()
        return make(config=config)
    # A task may raise any error for an unexpected value.
    except Exception as error:
        allowed = f"what {name} takes: {error or type(error).__name__}"
        told = ", ".join(words) or "none"
        raise ConfigError(
            [Problem("task-parameters", f"{section}.task_parameters", told, allowed, "correct it")]
        ) from error


def _parameters(task: str, words: Sequence[str], config_class: type, key: str) -> dict[str, Any]:
    """Return name -> parameter, with the types that the task's configuration declares."""
    types = typing.get_type_hints(config_class)
    known = {field.name: types[field.name] for field in dataclasses.fields(config_class) if field.name not in OURS}
    found: dict[str, Any] = {}
    problems = []
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            problems.append(Problem("not-key-value", key, repr(word), "NAME=VALUE", "write it so"))
        elif name in OURS:
            problems.append(
                Problem("parameter-of-another-key", key, repr(word), f"what is {task}'s alone", f"set {OURS[name]}")
            )
        elif name not in known:
            remedy = did_you_mean(name, known) or "choose one"
            problems.append(
                Problem(
                    "unknown-parameter", key, repr(word), f"a parameter of {task}: {', '.join(sorted(known))}", remedy
                )
            )
        else:
            found[name] = value = _value(text, known[name])
            if not _fits(value, known[name]):
                kind = known[name].__name__ if isinstance(known[name], type) else str(known[name])
                problems.append(
                    Problem("wrong-type", key, repr(word), f"{name} of the type {kind}", "correct the value")
                )
    if problems:
        raise ConfigError(problems)
    return found


def _value(text: str, kind: Any) -> Any:
    """Parse a value as Python or JSON; any other value, and every value of a text parameter, is text."""
    if isinstance(kind, type) and issubclass(kind, Enum) and text in [one.value for one in kind]:
        return kind(text)
    if kind is str:
        return text
    words = {"true": True, "false": False, "null": None}
    try:
        value = words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return float(value) if kind is float and type(value) is int else value


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a declared type; the task itself validates list items."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Union:
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, tuple, Sequence):
        return isinstance(value, list | tuple)
    return isinstance(value, origin) and isinstance(value, bool) == (origin is bool)

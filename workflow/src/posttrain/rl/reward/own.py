"""Calls reward functions of the user, in worker processes.

It supports two signatures, so that functions written for other trainers run unchanged:

    compute_score(data_source, solution_str, ground_truth, extra_info)     verl's: one response, a number or a dict
    f(prompts, completions, **columns)                                     TRL's: all responses to a prompt, a list
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from posttrain.config.own_reward import TRL, OwnReward
from posttrain.config.own_source import digest_of
from posttrain.rl.reward.answer import Answer, Grade
from posttrain.rl.reward.job import MAX_METRICS, checked, checked_metrics


@dataclass(frozen=True)
class OwnFunction:
    """A reward function, ready to be sent to a worker process.

    Args:
        own: Describes the function.
    """

    own: OwnReward
    is_instant: ClassVar[bool] = False

    @property
    def source(self) -> str:
        """The file in which it is defined."""
        return self.own.path

    @property
    def takes_groups(self) -> bool:
        """Whether the function grades all responses to a prompt in one call."""
        return self.own.signature == TRL

    @property
    def needs_label(self) -> bool:
        """Whether the function may read labels."""
        return self.own.needs_label

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
        """Return a grade for each answer; without `takes_groups`, calls the function once per answer.

        Raises:
            RuntimeError: The source has changed since planning.
            TypeError: The function's result is not a score.
            ValueError: A number is not finite; see `job.checked`.
        """
        function = getattr(load_module(self.own.path, self.own.digest), self.own.name)
        call = _call_trl if self.own.signature == TRL else _call_verl
        return call(function, answers)


@lru_cache
def load_module(path: str, digest: str) -> ModuleType:
    """Import a source once per process, after checking that it has not changed since planning."""
    content = Path(path).read_bytes()
    if digest_of(path, content) != digest:
        raise RuntimeError(f"{path}, or a file that it names, has changed since the run was planned")
    # Let it import files in its folder, as if run as a script.
    sys.path.insert(0, str(Path(path).resolve().parent))
    name = f"posttrain_own_{digest[:12]}"
    module = ModuleType(name)
    module.__file__ = path
    # Register the module, because dataclasses and pickle look names up there.
    sys.modules[name] = module
    # Execute the content that was hashed, even if the file has changed since.
    exec(compile(content, path, "exec"), module.__dict__)
    return module


def _call_verl(function: Callable[..., Any], answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
    grades = []
    for answer in answers:
        result = _finished(
            function(
                data_source=answer.columns.get("data_source", answer.source),
                solution_str=answer.text,
                ground_truth=answer.label,
                extra_info=answer.columns.get("extra_info"),
            )
        )
        parts = dict(result) if isinstance(result, Mapping) else {"score": result}
        if "score" not in parts:
            names = ", ".join(map(str, list(parts)[:MAX_METRICS]))
            raise TypeError(f"{_named(function)} returned a dict without 'score': {names:.200}")
        score = _number(function, parts.pop("score"), answer)
        # Skip texts and other values that cannot be charted.
        numbers = {key: number for key, value in parts.items() if (number := _as_float(value)) is not None}
        grades.append(Grade(score, checked_metrics(numbers)))
    return tuple(grades)


def _call_trl(function: Callable[..., Any], answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
    metrics: dict[str, float] = {}
    columns = {key: [answer.columns.get(key) for answer in answers] for key in answers[0].columns}
    handed = {
        **columns,
        "prompts": [_trl_prompt(answer) for answer in answers],
        "completions": [_trl_completion(answer) for answer in answers],
        "log_metric": lambda name, value: metrics.update(checked_metrics({**metrics, name: value})),
        "log_extra": lambda column, values: None,
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {key: value for key, value in handed.items() if takes_all or key in parameters}
    scores = list(_finished(function(**given)))
    if len(scores) != len(answers):
        raise TypeError(f"{_named(function)} returned {len(scores)} rewards for {len(answers)} completions")
    numbers = [_number(function, score, answer) for score, answer in zip(scores, answers, strict=True)]
    return tuple(Grade(number, metrics) for number in numbers)


def _finished(result: Any) -> Any:
    """Return a result, awaiting that of an `async def`."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _trl_prompt(answer: Answer) -> Any:
    return [dict(message) for message in answer.prompt] if answer.is_chat else answer.prompt[-1]["content"]


def _trl_completion(answer: Answer) -> Any:
    return [{"role": "assistant", "content": answer.text}] if answer.is_chat else answer.text


def _number(function: Callable[..., Any], score: Any, answer: Answer) -> float | None:
    if score is None:
        return None
    number = _as_float(score)
    if number is None:
        raise TypeError(f"{_named(function)} returned {score!r:.80} as a score; expected a number or None")
    try:
        return checked(Grade(number), answer).score
    except ValueError as error:
        raise ValueError(f"{_named(function)} returned {error}") from None


def _named(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})" if code else function.__name__


def _as_float(value: Any) -> float | None:
    """Return a number (also numpy's or torch's) as a float; None for anything else."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer of 400 digits
        return math.inf

"""Reward functions of the user, named `path.py:function`.

Two signatures are known, so that functions written for others run as they are:

    compute_score(data_source, solution_str, ground_truth, extra_info)     verl's: one response, a number or a dict
    f(prompts, completions, **columns)                                     TRL's: all responses to a prompt, a list

What a plan has to know is read from the source, which is not executed for it: the signature, and the digest that makes
the function a part of the run's identity. The digest covers the file and those that it names in `REWARD_FILES`; it sees
no further. Only worker processes import the file.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.reward.answer import Answer, Grade

VERL, TRL = "verl", "TRL"
# The parameters by which each is known, and those that it is given.
SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    VERL: (("solution_str", "ground_truth"), ("data_source", "solution_str", "ground_truth", "extra_info")),
    TRL: (("completions",), ("prompts", "completions", "log_metric", "log_extra")),
}
# What TRL's trainer hands over and a worker process does not have.
TRAINERS_OWN = ("trainer_state", "completion_ids", "environments")
# At the top level of a source: other files that its rewards depend on, relative to its folder.
NAMED_FILES = "REWARD_FILES"
_ALLOWED = "compute_score(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, **columns)"


@dataclass(frozen=True)
class OwnFunction:
    """A reward function, ready to be sent to a worker process.

    Args:
        path: The source.
        name: The function's.
        signature: `VERL` or `TRL`.
        digest: Of the source and the files that it names, SHA-256 in hex.
    """

    path: str
    name: str
    signature: str
    digest: str

    @property
    def takes_groups(self) -> bool:
        """Whether it grades all responses to a prompt in one call."""
        return self.signature == TRL

    @property
    def is_instant(self) -> bool:
        """Never: what a user wrote runs in a process of its own."""
        return False

    def __call__(self, answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
        """Return a grade for each answer; without `takes_groups` they are asked for one by one.

        Raises:
            RuntimeError: The source is not the one that was planned with.
            TypeError: The function returns something that is no score.
        """
        function = getattr(_load(self.path, self.digest), self.name)
        call = _call_trl if self.signature == TRL else _call_verl
        return call(function, answers)


def inspect_own(text: str, key: str) -> OwnFunction:
    """Find the function that `path.py:function` names, without executing anything.

    Args:
        text: What the configuration says.
        key: Where it says so, for the message.

    Raises:
        ConfigError: There is no such file or function, it is no Python, a file that it names is missing, or its
            parameters are not those of a known signature.
    """
    path, _, name = text.rpartition(":")
    try:
        content = Path(path).read_bytes()
        tree = ast.parse(content, path)
    except (OSError, SyntaxError, ValueError) as error:
        allowed = "path.py:function, from the folder in which the workflow runs"
        raise _refused(key, f"{text!r}: {error}", allowed, "correct path or source") from error
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise _refused(key, repr(text), f"a function at the top level of {path}: {known}", "correct the name")
    arguments = functions[name].args
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    signature = next((kind for kind, (marks, _) in SIGNATURES.items() if set(marks) <= set(parameters)), "")
    if not signature:
        remedy = "wrap it in a function with one of these signatures"
        raise _refused(key, f"{name}({', '.join(parameters)})", _ALLOWED, remedy)
    if missing := [name for name in _required(arguments) if signature == TRL and name in TRAINERS_OWN]:
        remedy = f"give {', '.join(missing)} a default: rewards are computed in processes beside the trainer"
        raise _refused(key, f"{name} needs {', '.join(missing)}", _ALLOWED, remedy)
    return OwnFunction(path, name, signature, _digest(path, content, tree, key))


def _refused(key: str, value: str, allowed: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key, value, allowed, remedy)])


def _required(arguments: ast.arguments) -> list[str]:
    """Return the names of all parameters without a default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    without = [*plain[: len(plain) - len(arguments.defaults)], *(arg for arg, default in named if default is None)]
    return [argument.arg for argument in without]


def _digest(path: str, content: bytes, tree: ast.Module, key: str) -> str:
    """Return the digest of a source and of the files that it names, in order."""
    digest = hashlib.sha256(content)
    for name in _named_files(tree, path, key):
        try:
            named = (Path(path).parent / name).read_bytes()
        except OSError as error:
            raise _refused(key, f"{NAMED_FILES} of {path}: {error}", "files that are there", "correct it") from error
        # Each with its length, so that a byte cannot move from one file to the next.
        digest.update(b"%d:%s" % (len(named), named))
    return digest.hexdigest()


def _named_files(tree: ast.Module, path: str, key: str) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == NAMED_FILES for t in node.targets):
            try:
                names = ast.literal_eval(node.value)
            except ValueError:
                names = None
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                allowed = "a list of texts that is written out: what a plan reads, it does not execute"
                raise _refused(key, f"{NAMED_FILES} in line {node.lineno} of {path}", allowed, "write the names out")
            return list(names)
    return []


@lru_cache
def _load(path: str, digest: str) -> ModuleType:
    """Import a source, once per process, after proving that it is the one that was planned with."""
    content = Path(path).read_bytes()
    if _digest(path, content, ast.parse(content, path), "data.reward") != digest:
        raise RuntimeError(f"{path}, or a file that it names, has changed since the run was planned")
    # Files beside it can be imported by it, as if it were started by itself.
    sys.path.insert(0, str(Path(path).resolve().parent))
    name = f"posttrain_reward_{digest[:12]}"
    module = ModuleType(name)
    module.__file__ = path
    # What it defines must be found by name: dataclasses and pickle look there.
    sys.modules[name] = module
    # What was read is what is executed, not what the file holds by now.
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
            raise TypeError(f"{function.__name__} returned a dict without 'score': {sorted(map(str, parts))}")
        score = _number(function, parts.pop("score"))
        # Texts and the like are for reading, not for charts.
        numbers = {str(key): float(value) for key, value in parts.items() if _is_number(value)}
        grades.append(Grade(score, numbers))
    return tuple(grades)


def _call_trl(function: Callable[..., Any], answers: tuple[Answer, ...]) -> tuple[Grade, ...]:
    metrics: dict[str, float] = {}
    columns = {key: [answer.columns.get(key) for answer in answers] for key in answers[0].columns}
    handed = {
        **columns,
        "prompts": [_trl_prompt(answer) for answer in answers],
        "completions": [_trl_completion(answer) for answer in answers],
        "log_metric": lambda name, value: metrics.update({str(name): float(value)}),
        "log_extra": lambda column, values: None,
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {key: value for key, value in handed.items() if takes_all or key in parameters}
    scores = list(_finished(function(**given)))
    if len(scores) != len(answers):
        raise TypeError(f"{function.__name__} returned {len(scores)} rewards for {len(answers)} completions")
    return tuple(Grade(_number(function, score), metrics) for score in scores)


def _finished(result: Any) -> Any:
    """Return a result; that of an `async def` once it is there."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _trl_prompt(answer: Answer) -> Any:
    return [dict(message) for message in answer.prompt] if answer.is_chat else answer.prompt[-1]["content"]


def _trl_completion(answer: Answer) -> Any:
    return [{"role": "assistant", "content": answer.text}] if answer.is_chat else answer.text


def _number(function: Callable[..., Any], score: Any) -> float | None:
    if score is None:
        return None
    if not _is_number(score):
        raise TypeError(f"{function.__name__} returned {score!r:.80} as a score; expected a finite number or None")
    return float(score)


def _is_number(value: Any) -> bool:
    """Tell whether it is a finite number, of numpy or torch too."""
    try:
        return not isinstance(value, (str, bytes)) and abs(float(value)) < float("inf")
    except (TypeError, ValueError):
        return False

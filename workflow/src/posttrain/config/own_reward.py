"""Reward functions of the user, named `path.py:function`, and prompts of judges: what a plan has to know of them.

It is read from the source, which is not executed for it: the signature, and the digest that makes the function a part
of the run's identity. The digest covers the file and those that it names in `REWARD_FILES`; it sees no further.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.data import sources_of
from posttrain.config.own_source import digest_of, read_source, refused
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem

VERL, TRL = "verl", "TRL"
# The parameters by which each is known, and those that it is given.
SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    VERL: (("solution_str", "ground_truth"), ("data_source", "solution_str", "ground_truth", "extra_info")),
    TRL: (("completions",), ("prompts", "completions", "log_metric", "log_extra")),
}
# What TRL's trainer hands over and a worker process does not have.
TRAINERS_OWN = ("trainer_state", "completion_ids", "environments")
# What a function can know a label by: parameters, or all that it was given at once.
_LABELS = {"ground_truth", "extra_info", "locals"}
_ALLOWED = "compute_score(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, **columns)"


@dataclass(frozen=True)
class OwnReward:
    """A reward function of the user's.

    Args:
        path: The source.
        name: The function's.
        signature: `VERL` or `TRL`.
        digest: Of the source and the files that it names, SHA-256 in hex.
        needs_label: False where its source shows that no label reaches it.
    """

    path: str
    name: str
    signature: str
    digest: str
    needs_label: bool = True


def inspect_own(text: str, key: str = "data.reward") -> OwnReward:
    """Find the function that `path.py:function` names, without executing anything.

    Args:
        text: What the configuration says.
        key: Where it says so, for the message.

    Raises:
        ConfigError: There is no such file or function, it is no Python, a file that it names is missing, or its
            parameters are not those of a known signature.
    """
    try:
        path, name, content, tree = read_source(text)
    except (OSError, SyntaxError, ValueError) as error:
        allowed = "path.py:function, from the folder in which the workflow runs"
        raise refused("reward-unreadable", key, f"{text!r}: {error}", allowed, "correct path or source") from error
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise refused(
            "no-such-function", key, repr(text), f"a function at the top level of {path}: {known}", "correct the name"
        )
    arguments = functions[name].args
    parameters = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    signature = next((kind for kind, (marks, _) in SIGNATURES.items() if set(marks) <= set(parameters)), "")
    if not signature:
        remedy = "wrap it in a function with one of these signatures"
        raise refused("reward-signature", key, f"{name}({', '.join(parameters)})", _ALLOWED, remedy)
    if missing := [name for name in _required(arguments) if signature == TRL and name in TRAINERS_OWN]:
        remedy = f"give {', '.join(missing)} a default: rewards are computed in processes beside the trainer"
        raise refused("reward-needs-trainer", key, f"{name} needs {', '.join(missing)}", _ALLOWED, remedy)
    needs_label = _needs_label(functions[name], signature, parameters)
    return OwnReward(path, name, signature, digest_of(path, content, key), needs_label)


def _needs_label(function: ast.FunctionDef | ast.AsyncFunctionDef, signature: str, parameters: list[str]) -> bool:
    """Return whether a label may reach a function; what the source does not show, may."""
    rest = function.args.kwarg.arg if function.args.kwarg else ""
    used = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    columns = set(parameters) - {*SIGNATURES[TRL][1], *TRAINERS_OWN} if signature == TRL else set()
    return bool(function.decorator_list or columns or used & {*_LABELS, rest})


def trained_rewards(config: Config) -> dict[str, str]:
    """Return what responses are graded by that are trained on, by key."""
    sources = sources_of(config.data).items()
    return {f"data.sources.{name}.reward" if name else "data.reward": data.reward for name, data in sources}


def own_digests(config: Config, rewards: Mapping[str, str]) -> tuple[list[str], list[Problem]]:
    """Return the digests of all files of the user's that rewards stand for, and what is wrong with them.

    Args:
        config: The resolved configuration.
        rewards: As `data.reward`, by key.
    """
    digests: list[str] = []
    problems: list[Problem] = []
    for key, reward in rewards.items():
        try:
            for term in parse_reward(reward, key):
                if term.is_own:
                    digests.append(inspect_own(term.grader, key).digest)
                elif judge := config.reward.judges.get(term.grader):
                    content = read_prompt(judge.prompt_file, f"reward.judges.{term.grader}.prompt_file")
                    digests.append(hashlib.sha256(content.encode()).hexdigest())
        except ConfigError as error:
            problems += error.problems
    return list(dict.fromkeys(digests)), list(dict.fromkeys(problems))


def read_prompt(path: str, key: str) -> str:
    """Return what a judge is asked, before anything is put into it.

    Raises:
        ConfigError: There is no such file, it is no text, or the response has no place in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise refused(
            "file-unreadable", key, f"{path!r}: {error}", "a file of text", "correct the path or the file"
        ) from error
    if "{response}" not in text:
        remedy = "put {response} where the response belongs"
        raise refused("placeholder-missing", key, repr(path), "a text with {response}", remedy)
    return text


def _required(arguments: ast.arguments) -> list[str]:
    """Return the names of all parameters without a default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    without = [*plain[: len(plain) - len(arguments.defaults)], *(arg for arg, default in named if default is None)]
    return [argument.arg for argument in without]

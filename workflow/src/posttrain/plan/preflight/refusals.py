"""Requests that can be planned but not run by this version, rule by rule, and the nearest that can run.

The driver checks the rules that would run: a dry run ends with these messages, a run stops before its first job.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.data import UNPINNED
from posttrain.config.engine import SECRET_VARIABLE
from posttrain.config.rules import check_convertible, check_trainable
from posttrain.config.schema import Config
from posttrain.config.suites import check_pinned
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.plan.job_needs import SERVING, check_compared, check_served
from posttrain.plan.preflight.image_processor import check_image_processor_of_source
from posttrain.plan.preflight.lm_eval import find_lm_eval_problems
from posttrain.plan.preflight.reward_tokens import check_reward_tokens
from posttrain.plan.preflight.sandbox import find_missing_secret
from posttrain.plan.preflight.wandb_key import check_wandb
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

# Rules that fetch a model, which may not be convertible, and that train. Other rules, except those that serve, need
# no feature that this version lacks.
FETCHING = ("list_hf_checkpoint", "download_hf_checkpoint")
TRAINING = ("resolve_config", "train")
GRADING = (*TRAINING, "approve_data", "approve_environment", "evaluate")
# Rules that read suites; the same rule also fetches calibration data.
ASKING = ("approve_data", "evaluate", "ask_precision")
# Serve the model in the evaluations' precision; each precision of a comparison is checked separately.
SERVING_ONE = tuple(rule for rule in SERVING if rule != "ask_precision")
# Minimum response length of a nearest configuration.
SHORTEST_RESPONSE_TOKENS = 1024
PAGE = "`snakemake plan` with the same --config draws all figures."


def find_refusals(config: Config, rules: Collection[str]) -> list[Problem]:
    """Return the problems that prevent this version from running some rules.

    Args:
        config: The resolved configuration.
        rules: Names of the rules that would run; a workflow that imports this one may add a prefix.
    """
    found: list[Problem] = []
    if any(rule.endswith(FETCHING) for rule in rules):
        found += check_convertible(config)
    if any(rule.endswith(TRAINING) for rule in rules):
        missing_key = check_wandb(config).problem
        found += [*check_trainable(config), *find_problems(config), *([missing_key] if missing_key else [])]
    if any(rule.endswith("download_rows") for rule in rules) and any(rule.endswith(ASKING) for rule in rules):
        found += check_pinned(config)
    if any(rule.endswith(SERVING) for rule in rules):
        found += _check_secret(config)
    if any(rule.endswith(SERVING_ONE) for rule in rules):
        found += check_served(config)
    if any(rule.endswith(("ask_precision", "compare_precisions")) for rule in rules):
        found += check_compared(config)
    if any(rule.endswith("benchmark_serving") for rule in rules):
        found += _check_benchmark(config)
    if any(rule.endswith("lm_eval") for rule in rules):
        found += find_lm_eval_problems(config)
    if any(rule.endswith(GRADING) for rule in rules):
        found += [finding.problem for finding in check_reward_tokens(config) if finding.problem]
        found += [problem] if (problem := find_missing_secret(config)) else []
    return list(dict.fromkeys(found))


def _check_benchmark(config: Config) -> Iterator[Problem]:
    """Yield a problem if a benchmark exceeds the model's maximum length."""
    asked, room = config.evaluation.serving, config.model.architecture.max_position_embeddings
    length = asked.output_tokens + (asked.input_tokens if asked.prompts == "random" else 1)
    if length > room:
        keys = "evaluation.serving: input_tokens + output_tokens"
        remedy = "ask for fewer tokens"
        yield Problem("exceeds-positions", keys, f"{length:,}", f"at most {room:,}, the positions of the model", remedy)


def _check_secret(config: Config) -> Iterator[Problem]:
    """Yield a problem if external engines need a secret that is not set; messages never show it."""
    if config.evaluation.addresses and not os.environ.get(SECRET_VARIABLE):
        allowed = "the secret of the engines at evaluation.addresses"
        remedy = "set it in the environment, as it is set for these engines"
        yield Problem("secret-not-set", SECRET_VARIABLE, "not set", allowed, remedy)


def refuse_unfit(paths: Paths) -> None:
    """Raise a `ConfigError` if the run does not fit this hardware and site; a finished training is accepted."""
    if not paths.train_done.exists():
        raise_if_any([*find_problems(paths.resolved.config), *check_image_processor_of_source(paths)], hint=PAGE)


def refusal(workflow: Mapping[str, Any], config_dir: Path, config: Config, rules: Collection[str]) -> str:
    """Return the message of `find_refusals`, with the nearest request that works; empty if all rules can run.

    Args:
        workflow: The request that the configuration was resolved from.
        config_dir: The folder `config/`.
        config: The resolved configuration.
        rules: Names of the rules that would run.
    """
    problems = find_refusals(config, rules)
    if not problems:
        return ""
    lines = ["this version cannot run what is asked for:", *(f"  - {problem}" for problem in problems)]
    if nearest := nearest_request(workflow, config_dir, config):
        lines.append(f"  nearest that it can train: {nearest}")
    return "\n".join([*lines, PAGE])


def nearest_request(workflow: Mapping[str, Any], config_dir: Path, config: Config) -> str:
    """Return the nearest request that this version can train, in words; "" if there is none or it can train this one.

    Args:
        workflow: The request that the configuration was resolved from.
        config_dir: The folder `config/`.
        config: The configuration.
    """
    if not [*check_trainable(config), *find_problems(config)]:
        return ""  # The problem is another one: a W&B key, an evaluation.
    # Values that only the user knows have a placeholder in the trial, and stay blank in the answer.
    stands_in = {"site.launcher": "slurm", "site.node_names": "[]"} if _needs_site(config) else {}
    stands_in |= {"model.source.revision": "a" * 40} if config.model.source.revision == UNPINNED else {}
    for changes in _changes(config):
        if _is_trainable(workflow, {**changes, **stands_in}, config_dir):
            return _as_request(workflow, config, changes)
    return ""


def _needs_site(config: Config) -> bool:
    return config.nodes > 1 and config.site.launcher == "local"


def _changes(config: Config) -> Iterator[dict[str, object]]:
    """Yield possible changes, smallest first: only the user's own values, then ever shorter responses."""
    yield {}
    tokens = config.rollout.max_response_tokens // 2
    while tokens >= SHORTEST_RESPONSE_TOKENS:
        yield {"rollout.max_response_tokens": tokens}
        tokens //= 2


def _is_trainable(workflow: Mapping[str, Any], changes: Mapping[str, object], config_dir: Path) -> bool:
    try:
        config = resolve({**workflow, "set": _overrides(workflow, changes)}, config_dir).config
    except ConfigError:
        return False
    return not [*check_trainable(config), *find_problems(config)]


def _as_request(workflow: Mapping[str, Any], config: Config, changes: Mapping[str, object]) -> str:
    words = ["site=NAME, of a site with launcher slurm or kubernetes"] if _needs_site(config) else []
    blank = {"model.source.revision": "COMMIT"} if config.model.source.revision == UNPINNED else {}
    if overrides := _overrides(workflow, {**changes, **blank}):
        words.append(f"set='{overrides}'")
    return ", and ".join(words)


def _overrides(workflow: Mapping[str, Any], changes: Mapping[str, object]) -> str:
    given = [word for word in str(workflow.get("set") or "").split() if word.partition("=")[0] not in changes]
    return " ".join([*given, *(f"{key}={value}" for key, value in changes.items())])

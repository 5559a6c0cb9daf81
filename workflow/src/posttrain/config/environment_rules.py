"""Rules of environments. The class of an environment of the user's is read once, at the start of a command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from posttrain.config.data import sources_of
from posttrain.config.derived import uses_engines
from posttrain.config.environment import MAX_PROGRAMS, OWN_PARSER, SGLANG_PARSERS, EnvironmentSettings
from posttrain.config.fields import did_you_mean
from posttrain.config.own_environment import BUILT_IN, KEY, SCHEMES, is_address, is_own
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.service_rules import wrong_url
from posttrain.config.suites import suite_rewards
from posttrain.document import ANY
from posttrain.errors import ConfigError, Problem

Problems = Iterator[Problem]
GRADER = "environment"
# Of the time that programs may take: how long they may wait for others, too.
WAITING_SHARE = 0.5


def _name(config: Config) -> Problems:
    environment = config.data.environment
    if is_address(environment):
        scheme, _, rest = environment.partition("://")
        if scheme not in SCHEMES or (problem := wrong_url(f"http://{rest}")):
            found = repr(environment) if scheme not in SCHEMES else problem.replace("http", scheme, 1)
            allowed = f"host and port, and perhaps a path, behind {', '.join(f'{known}://' for known in SCHEMES)}"
            yield Problem("not-an-address", KEY, found, allowed, "correct it; a user or a password has no place in it")
    elif environment and not is_own(environment) and environment not in BUILT_IN:
        allowed = f"{', '.join(BUILT_IN)}, path.py:Class, or the address of a service"
        remedy = did_you_mean(environment, BUILT_IN) or "choose one"
        yield Problem("unknown-environment", KEY, repr(environment), allowed, remedy)


def _turns(config: Config) -> Problems:
    longest, all_tokens = config.environment.max_turn_tokens, config.rollout.max_response_tokens
    if config.data.environment and longest > all_tokens:
        key, allowed = "environment.max_turn_tokens", f"at most {all_tokens} (rollout.max_response_tokens)"
        remedy = "lower it, or raise rollout.max_response_tokens, the limit for all turns together"
        yield Problem("turn-exceeds-episode", key, str(longest), allowed, remedy)


def _objective(config: Config) -> Problems:
    if config.data.environment and not uses_engines(config):
        allowed = "'' with training.objective=sft, which samples nothing"
        yield Problem("not-for-supervised", KEY, repr(config.data.environment), allowed, "leave it out")


def _reward(config: Config) -> Problems:
    for name, data in sources_of(config.data).items():
        key = f"data.sources.{name}.reward" if name else "data.reward"
        with contextlib.suppress(ConfigError):  # told by another rule
            graders = [term.grader for term in parse_reward(data.reward, key)]
            if config.data.environment and GRADER not in graders:
                allowed = (
                    f"a sum with {GRADER}, the environment's own reward, perhaps with graders of the last response"
                )
                yield Problem("reward-without-environment", key, repr(data.reward), allowed, f"set {key}={GRADER}")
            elif not config.data.environment and GRADER in graders:
                allowed = f"another grader without {KEY}"
                yield Problem(
                    "reward-of-another-kind", key, repr(data.reward), allowed, f"set {KEY}, or choose another"
                )


def _suites(config: Config) -> Problems:
    for key, reward in suite_rewards(config).items():
        with contextlib.suppress(ConfigError):
            if GRADER in [term.grader for term in parse_reward(reward, key)]:
                allowed = f"a grader of single responses; without {key} the suite is played in the run's environment"
                yield Problem("reward-of-another-kind", key, repr(reward), allowed, "leave it out")


def _segments(config: Config) -> Problems:
    aggregation = config.algorithm.loss_aggregation
    if config.environment.history == "template" and aggregation == "micro_batch_mean":
        allowed = "token_mean, sample_mean or constant with environment.history=template"
        remedy = "choose another: the weight of an episode would depend on which micro-batches its segments are in"
        yield Problem("segments-of-micro-batches", "algorithm.loss_aggregation", aggregation, allowed, remedy)


def _parser(config: Config) -> Problems:
    parser = config.environment.tool_call_parser
    known = (OWN_PARSER, *SGLANG_PARSERS)
    if parser not in known:
        remedy = did_you_mean(parser, known) or "choose one"
        yield Problem("unknown-parser", "environment.tool_call_parser", repr(parser), ", ".join(known), remedy)
        return
    if config.data.environment and parser != OWN_PARSER and config.engine.kind != "sglang":
        allowed = f"{OWN_PARSER} with engine.kind={config.engine.kind}: other parsers are SGLang's"
        yield Problem("parser-of-sglang", "environment.tool_call_parser", repr(parser), allowed, "leave it out")


def least_deadline(seconds: float) -> float:
    """Return how long a call of the environment `python` has to be allowed to take.

    Args:
        seconds: Time limit of a program.
    """
    return MAX_PROGRAMS * seconds * (1 + WAITING_SHARE)


def _deadline(config: Config) -> Problems:
    """Slow programs are an agent's fault; a call that exceeds its deadline has no reward."""
    deadline, least = config.environment.deadline_seconds, least_deadline(config.sandbox.seconds)
    if config.data.environment == "python" and deadline < least:
        allowed = f"at least {least:g}: {MAX_PROGRAMS} programs of sandbox.seconds, and half as long to wait"
        remedy = "raise it, or lower sandbox.seconds"
        yield Problem("deadline-below-programs", "environment.deadline_seconds", f"{deadline:g}", allowed, remedy)


def _without_environment(config: Config) -> Problems:
    """Engineering knobs, which a site's file may set for all runs, are left alone."""
    if config.data.environment:
        return
    for field in dataclasses.fields(EnvironmentSettings):
        value = getattr(config.environment, field.name)
        if field.metadata["unnamed"] is not ANY and value != field.default:
            allowed = f"{field.default!r} without {KEY}"
            remedy = f"set {KEY}, or leave it out"
            yield Problem("unused-value", f"environment.{field.name}", repr(value), allowed, remedy)


ENVIRONMENT_RULES: tuple[Callable[[Config], Problems], ...] = (
    _name,
    _turns,
    _objective,
    _reward,
    _suites,
    _segments,
    _parser,
    _deadline,
    _without_environment,
)

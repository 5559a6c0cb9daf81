"""Rules of environments. The class of an environment of the user's is read once, at the start of a command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from posttrain.config.derived import uses_engines
from posttrain.config.environment import EnvironmentSettings
from posttrain.config.fields import did_you_mean
from posttrain.config.own_environment import BUILT_IN, KEY, SCHEMES, is_address, is_own
from posttrain.config.schema import Config
from posttrain.config.service_rules import wrong_url
from posttrain.document import ANY
from posttrain.errors import Problem

Problems = Iterator[Problem]


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


ENVIRONMENT_RULES: tuple[Callable[[Config], Problems], ...] = (_name, _turns, _objective, _without_environment)

"""Rules of `reward.services`, `reward.judges` and `sandbox.address`. Messages never show a misplaced secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from posttrain.config.own_reward import trained_rewards
from posttrain.config.patterns import check_pattern
from posttrain.config.reward import BUILT_IN
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.services import Address
from posttrain.config.suites import suite_rewards
from posttrain.errors import Problem

Problems = Iterator[Problem]
# Names are terms of `data.reward` and parts of metric names.
_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,99}"
# Lower-case letters are rejected, because a token that was written here by mistake nearly always has some.
_VARIABLE = r"[A-Z][A-Z0-9_]*"


def addresses(config: Config, only_used: bool = False) -> Iterator[tuple[str, str, Address]]:
    """Yield (section, name, settings) of every service and judge, or of those used in a reward."""
    rewards = [*trained_rewards(config).values(), *suite_rewards(config).values()] if only_used else []
    used = {term.grader for reward in rewards for term in parse_reward(reward)}
    for section, table in (("services", config.reward.services), ("judges", config.reward.judges)):
        for name, address in table.items():
            if not only_used or name in used:
                yield f"reward.{section}.{name}", name, address


def _names(config: Config) -> Problems:
    taken = {*BUILT_IN}
    for section, name, _ in addresses(config):
        if name in taken:
            yield Problem("name-taken", section, repr(name), "a name that no other grader has", "give it another name")
        if not re.fullmatch(_NAME, name):
            allowed = "letters, digits, '_' and '-'; it starts with a letter"
            yield Problem("not-a-name", section, repr(name), allowed, "give it another name")
        taken.add(name)


def _addresses(config: Config) -> Problems:
    for section, _, address in addresses(config):
        if problem := wrong_url(address.url):
            allowed = "http://host:port/path or https://, without user, password and query"
            remedy = f"a secret belongs into the environment: {section}.token_variable names the variable"
            yield Problem("not-an-address", f"{section}.url", problem, allowed, remedy)
        if address.token_variable and not re.fullmatch(_VARIABLE, address.token_variable):
            allowed = "the name of an environment variable, in capital letters"
            remedy = "export the token, and give the variable's name; revoke a token that was written here"
            yield Problem("secret-in-config", f"{section}.token_variable", "a text that is not shown", allowed, remedy)


def wrong_url(url: str) -> str:
    """Return a malformed address without its possibly secret parts; "" for a well-formed one."""
    hidden = re.sub(r"(?<=//)[^/]*@|(?<=[?#]).*", "***", url)
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return repr(hidden)
    return "" if is_whole and hidden == url and re.fullmatch(r"[!-~]+", url) else repr(hidden)


def _judges(config: Config) -> Problems:
    """The prompt's file is checked once, at the start of a command (`config.own_reward`)."""
    for name, judge in config.reward.judges.items():
        section = f"reward.judges.{name}"
        for key in ("model", "prompt_file"):
            if not getattr(judge, key):
                remedy = "name it as the address does" if key == "model" else "write it, with {prompt} and {response}"
                yield Problem("not-set", f"{section}.{key}", "''", "a model" if key == "model" else "a file", remedy)
        yield from _pattern(f"{section}.verdict_pattern", judge.verdict_pattern, num_groups=1)


def _format(config: Config) -> Problems:
    yield from _pattern("reward.format_pattern", config.reward.format_pattern)


def _pattern(key: str, pattern: str, num_groups: int | None = None) -> Problems:
    try:
        found = check_pattern(pattern)
    except ValueError as error:
        yield Problem(
            "not-a-pattern", key, str(error), "a regular expression that needs no exponential time", "correct it"
        )
        return
    if num_groups not in (None, found):
        allowed = f"a regular expression with {num_groups} group"
        remedy = "write (?:...) for groups that are not the verdict"
        yield Problem("pattern-groups", key, f"{pattern!r} with {found}", allowed, remedy)


def _sandbox(config: Config) -> Problems:
    if config.sandbox.address and (problem := wrong_url(config.sandbox.address)):
        allowed = "http://host:port or https://, without user, password and query"
        remedy = "give the address of `python -m posttrain.sandbox.serve`; its secret belongs into the environment"
        yield Problem("not-an-address", "sandbox.address", problem, allowed, remedy)


SERVICE_RULES: tuple[Callable[[Config], Problems], ...] = (_names, _addresses, _judges, _format, _sandbox)

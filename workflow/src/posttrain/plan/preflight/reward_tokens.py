"""Checks that the environment has the tokens of services and judges; dry runs check them and contact no service."""

from __future__ import annotations

import os
import re

from posttrain.config.schema import Config
from posttrain.config.service_rules import addresses
from posttrain.config.services import Address
from posttrain.errors import ConfigError, Problem
from posttrain.plan.preflight.report import Finding, ok


def token_of(section: str, address: Address) -> str:
    """Return the token for an address; "" if it needs none.

    Raises:
        ConfigError: The environment lacks it, or it has invalid characters; the message never shows the token.
    """
    variable = address.token_variable
    if not variable:
        return ""
    token = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        value = f"{variable}, {'in which there are other characters' if token else 'which is not set'}"
        allowed = "a variable of the environment with a token of printable ASCII characters"
        raise ConfigError(
            [Problem("secret-not-set", f"{section}.token_variable", value, allowed, f"export {variable}")]
        )
    return token


def check_reward_tokens(config: Config) -> list[Finding]:
    """Check that the tokens of all services and judges in `data.reward` are set. They are never shown."""
    findings = []
    for section, _, address in addresses(config, only_used=True):
        try:
            token_of(section, address)
        except ConfigError as error:
            findings += [Finding(section, problem.value, problem) for problem in error.problems]
        else:
            where = f"the token is in {address.token_variable}" if address.token_variable else "no token is asked for"
            findings.append(ok(section, where))
    return findings

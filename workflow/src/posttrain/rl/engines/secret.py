"""The secret shared by an engine and its clients: one per attempt, only in their environment.

Every request carries it; an engine refuses requests without it before reading the body.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from posttrain.config.engine import SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem

# Space-separated URLs of a job's engines; set together with their secret.
ENGINES_VARIABLE = "POSTTRAIN_ENGINES"


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def take_secret() -> str:
    """Return the environment's secret and remove it, so that child processes do not inherit it.

    Raises:
        ConfigError: The environment has no secret.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "")
    if not secret:
        remedy = "set it in the environment of the engine and of its clients"
        raise ConfigError([Problem("secret-not-set", SECRET_VARIABLE, "not set", "a secret text", remedy)])
    return secret


def variables_of(urls: Sequence[str], secret: str) -> Mapping[str, str]:
    """Return the environment variables that tell a process its engines."""
    return {ENGINES_VARIABLE: " ".join(urls), SECRET_VARIABLE: secret}


def authorization(secret: str) -> dict[str, str]:
    """Return the `Authorization` header with the secret, as SGLang expects it."""
    return {"Authorization": f"Bearer {secret}"}

"""The secret that an engine shares with its clients: one per attempt, in their environment and nowhere else.

Every request carries it, and an engine refuses any other before it reads its body.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from posttrain.config.engine import SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem

# Where the engines of a job answer, with spaces between them; with it comes their secret.
ENGINES_VARIABLE = "POSTTRAIN_ENGINES"


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def take_secret() -> str:
    """Return the secret of the environment, and take it out of there: processes started from here need none.

    Raises:
        ConfigError: There is none.
    """
    secret = os.environ.pop(SECRET_VARIABLE, "")
    if not secret:
        remedy = "set it, in the environment, for the engine and for those who use it"
        raise ConfigError([Problem(SECRET_VARIABLE, "not set", "a text that nobody else knows", remedy)])
    return secret


def variables_of(urls: Sequence[str], secret: str) -> Mapping[str, str]:
    """Return the environment variables that name a process's engines."""
    return {ENGINES_VARIABLE: " ".join(urls), SECRET_VARIABLE: secret}


def authorization(secret: str) -> dict[str, str]:
    """Return the header that shows the secret, as SGLang wants it."""
    return {"Authorization": f"Bearer {secret}"}

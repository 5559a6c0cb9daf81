"""Programs and results as JSON, as a sandbox service and its clients exchange them (docs/sandbox.md)."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, get_args

from posttrain.config.sandbox import SANDBOX_SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem
from posttrain.sandbox.program import Ended, Limits, Program, Result

PATH = "/run"
MAX_REQUEST_BYTES = 64 << 20
# Limits that no client may exceed.
MAX_OUTPUT_KIB = 1 << 14
HIGHEST = Limits(3600, 1 << 16, 4096, MAX_OUTPUT_KIB, open_files=4096, files=1 << 20)


def request_of(program: Program, limits: Limits) -> dict[str, Any]:
    """Return the request that runs a program."""
    return {
        "source": program.source,
        "argv": list(program.argv),
        "stdin": _text(program.stdin),
        "files": {name: _text(content) for name, content in program.files.items()},
        "limits": dataclasses.asdict(limits),
    }


def read_request(message: Any) -> tuple[Program, Limits]:
    """Return the program of a request, and its limits.

    Raises:
        ValueError: It is no request, or its limits are not positive or too high.
    """
    try:
        files = {str(name): _bytes(content) for name, content in message["files"].items()}
        argv = tuple(map(str, message["argv"]))
        program = Program(str(message["source"]), argv, _bytes(message["stdin"]), files)
        given = message["limits"]
        limits = Limits(**{name: type(value)(given[name]) for name, value in dataclasses.asdict(Limits()).items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a request: {type(error).__name__}: {error}") from error
    for name, most in vars(HIGHEST).items():
        if not 0 < (value := getattr(limits, name)) <= most:
            raise ValueError(f"{name}={value}: expected a positive number up to {most}")
    return program, limits


def answer_of(result: Result) -> dict[str, Any]:
    """Return the answer for a result."""
    outputs = {"stdout": _text(result.stdout), "stderr": _text(result.stderr)}
    return {**dataclasses.asdict(result), **outputs, "truncated": list(result.truncated)}


def read_answer(message: Mapping[str, Any]) -> Result:
    """Return the result of an answer.

    Raises:
        LookupError, TypeError, ValueError: It is no answer.
    """
    if message["ended"] not in get_args(Ended):
        raise ValueError(f"ended={message['ended']!r}")
    return Result(
        message["ended"],
        int(message["exit_code"]),
        _bytes(message["stdout"]),
        _bytes(message["stderr"]),
        tuple(map(str, message["truncated"])),
        float(message["seconds"]),
    )


def shared_secret() -> str:
    """Return the secret of the environment that a service and its clients share.

    Raises:
        ConfigError: The environment has none.
    """
    secret = os.environ.get(SANDBOX_SECRET_VARIABLE, "")
    if not (secret.isascii() and secret.isprintable() and secret.strip() == secret and secret):
        value = "not set" if not secret else "set to a text with other characters"
        remedy = "set it in the environment of the sandbox service and of the workflow"
        allowed = "a secret text of printable ASCII characters"
        raise ConfigError([Problem("secret-not-set", SANDBOX_SECRET_VARIABLE, value, allowed, remedy)])
    return secret


def authorization(secret: str) -> dict[str, str]:
    """Return the header that shows the secret."""
    return {"Authorization": f"Bearer {secret}"}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)

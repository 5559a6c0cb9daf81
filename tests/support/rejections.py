"""Rejections by code and key. Sentences are for people and may change, so no test matches them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from posttrain.errors import CheckpointError, ConfigError

Rejection = ConfigError | CheckpointError


@contextmanager
def rejected(code: str, *data: object, key: str | None = None) -> Iterator[pytest.ExceptionInfo[Rejection]]:
    """Expect that something is rejected.

    Args:
        code: What the rejection is identified by.
        data: What its text has to hold, such as names, figures and suggestions.
        key: Of the problem, where it is one.
    """
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        yield caught
    assert_rejection(caught.value, code, *data, key=key)


def assert_rejection(error: BaseException, code: str, *data: object, key: str | None = None) -> None:
    """Check a rejection; see `rejected`."""
    texts = [text for found, its_key, text in _parts(error) if found == code and key in (None, its_key)]
    assert texts, f"expected [{code}] of {key or 'any key'}, got: {error}"
    lacking = [str(datum) for datum in data if not any(str(datum) in text for text in texts)]
    assert not lacking, f"{lacking} not in: {error}"


def assert_rejected(text: str, code: str, *data: object, key: str | None = None) -> None:
    """Check that an output shows a rejection.

    Args:
        text: What a command has written.
        code: What the rejection is identified by.
        data: What the output has to hold besides.
        key: Of the problem, where it is one.
    """
    start = r".*" if key is None else rf".*(?<![\w.-]){re.escape(key)} = .*"
    # The value may have several lines, of which the first ends with the code.
    assert re.search(rf"^{start}\[{re.escape(code)}\]\s*$", text, re.MULTILINE), f"no {key or ''} [{code}] in: {text}"
    lacking = [str(datum) for datum in data if str(datum) not in text]
    assert not lacking, f"{lacking} not in: {text}"


def _parts(error: BaseException) -> list[tuple[str, str, str]]:
    """Return code, key and text of all that an error rejects."""
    if isinstance(error, ConfigError):
        return [(problem.code, problem.key, f"{problem}") for problem in error.problems]
    return [(error.code, "", str(error))] if isinstance(error, CheckpointError) else []

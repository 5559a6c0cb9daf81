"""The secret between an engine and those whom it obeys."""

from __future__ import annotations

import os
import re

import pytest
from tests.support.rejections import rejected

from posttrain.rl.engines.secret import SECRET_VARIABLE, authorization, new_secret, take_secret


def test_every_secret_is_new_and_has_256_bits() -> None:
    made = {new_secret() for _ in range(20)}
    assert len(made) == 20
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made)


def test_it_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of the attempt")
    assert take_secret() == "of the attempt"
    assert SECRET_VARIABLE not in os.environ


@pytest.mark.parametrize("value", [None, ""])
def test_none_is_refused_and_the_variable_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(SECRET_VARIABLE, value)
    with rejected("secret-not-set", key=SECRET_VARIABLE):
        take_secret()


def test_it_is_shown_as_a_bearer_token() -> None:
    assert authorization("abc") == {"Authorization": "Bearer abc"}

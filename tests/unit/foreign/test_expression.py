"""Numbers and lists as flags spell them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain.foreign.expression import literal


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("-3", -3), ("[0]*2+[1]*3", [0, 0, 1, 1, 1]), ("x", None), ("", None), ("[1, 2.5]", [1, 2.5])],
)
def test_numbers_and_lists(text: str, value: Any) -> None:
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[" * 40 + "0" + "]*9000" * 40,
        "[0]*9000*9000",
        "[" * 5000,
        "9**9**9**9",
        "-" * 60_000 + "1",
        "1+" * 30_000 + "1",
    ],
)
def test_bombs_are_no_number(text: str) -> None:
    begun = time.process_time()
    assert literal(text) is None
    assert time.process_time() - begun < 1

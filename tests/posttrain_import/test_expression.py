"""Numbers and lists as flags spell them."""

from __future__ import annotations

import ast
import time
from typing import Any

import pytest

from posttrain_import.expression import Piece, Text, Unknown, called, constant, folded, literal, text_of, whole_number


def value_of(text: str) -> Any:
    """Return what an expression is; the reason where it is not known."""
    found = folded(ast.parse(text, mode="eval").body)
    return found.why if isinstance(found, Unknown) else found


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


@pytest.mark.parametrize(
    "text",
    [
        *("7 + 2", "7 - 2", "7 * 2", "7 // 2", "7 / 2", "7 % 4", "7 ** 2", "7 << 2", "-7", "not 0", "not 7"),
        *("7 == 7", "7 != 7", "7 < 7", "7 <= 7", "7 > 7", "7 >= 7", "[7] is None", "[7] is not None", "None is None"),
        *("7 in [7, 8]", "9 in [7, 8]", "7 not in [7, 8]", "9 not in [7, 8]", "[1, 2] + [3]", "[0] * 3", "(1, 2)"),
        *("0 or 7 or 8", "7 or 8", "0 or 0", "7 and 8", "7 and 0 and 8", "1 if 7 else 2", "1 if 0 else 2"),
        *("2 ** 62", "1 << 62", "(2 ** 62) * 2", "-(2 ** 62) * 2", "65536 ** 1", "7 ** 0"),
    ],
)
def test_expressions_are_what_python_makes_of_them(text: str) -> None:
    expected = eval(text)
    assert value_of(text) == (list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(2 ** 62) * 2 + 1", "it is too large"),
        ("1 ** 63", "it is too large"),
        ("1 << 63", "it is too large"),
        ("2 ** -1", "it is too large"),
        ("65537 ** 1", "it is too large"),
        ("[0] * 10001", "it is too long"),
        ("[0] * 10000 + [0]", "it is too large"),
        ("[[1]]", "it is a list of lists"),
        ("[1, [2]]", "it is a list of lists"),
        ("'a' * 10 ** 15", "it is computed when the launcher runs"),
        ("7 @ 2", "it is computed when the launcher runs"),
        ("7 + 'a'", "it is computed when the launcher runs"),
        ("'a' * 7", "it is computed when the launcher runs"),
        ("7 + None", "it is computed when the launcher runs"),
        ("7 % 0", "it is computed when the launcher runs"),
        ("7 < None", "it is compared when the launcher runs"),
        ("1 < 2 < 3", "it is computed when the launcher runs"),
        ("x", "it is computed when the launcher runs"),
        ("x or 1", "it is computed when the launcher runs"),
        ("0 or x", "it is computed when the launcher runs"),
        ("1 if x else 2", "it is computed when the launcher runs"),
        ("1 + x", "it is computed when the launcher runs"),
    ],
)
def test_what_is_not_computed_says_why(text: str, why: str) -> None:
    assert value_of(text) == why


def test_an_operand_that_decides_hides_one_that_is_not_known() -> None:
    assert value_of("1 or x") == 1
    assert value_of("0 and x") == 0


def test_lists_have_as_many_words_as_flags_and_no_more() -> None:
    assert value_of(f"[0] * {10_000}") == [0] * 10_000
    assert text_of([Piece("a", 1, 1)] * 10_000) == Text((Piece("a", 1, 1),) * 10_000)
    assert text_of([Piece("a", 1, 1)] * (10_000 + 1)) == Unknown("it is too long")
    assert isinstance(text_of([Piece("a" * 65_536, 1, 1)]), Text)
    assert text_of([Piece("a" * 65_536, 1, 1), Piece("b", 1, 1)]) == Unknown("it is too long")


def test_functions_of_plain_values() -> None:
    assert [called(name, [3, 5]) for name in ("min", "max")] == [3, 5]
    assert [called("int", ["7"]), called("len", [[1, 2]]), called("float", ["0.5"])] == [7, 2, 0.5]
    for name, values in (("open", ["x"]), ("int", ["x"]), ("len", [7]), ("int", [float("inf")])):
        assert called(name, values) == Unknown(f"{name}() is computed when the launcher runs")


def test_texts_are_known_where_all_their_pieces_are() -> None:
    known, unknown = Piece("a", 1, 1), Piece("b", 1, 1, "why")
    assert constant(Text((known, known))) == "aa"
    assert constant(Text((known, unknown))) == Unknown("it is computed when the launcher runs")
    assert constant(3) == 3


@pytest.mark.parametrize(("text", "number"), [("2*(3+4)", 14), (" 7", 7), ("7.0", None), ("[1]", None), ("x", None)])
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number
    assert literal("[1, 'a']") is None

"""What is too long, too deep or too costly is no answer: the last that is read, and the first that is not."""

import pytest

from posttrain.rl.reward.equality import are_equal
from posttrain.rl.reward.expression import same_value


def _cells(count: int) -> str:
    return r"\begin{pmatrix}" + "&".join("1" * (count + 1)) + r"\end{pmatrix}"


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (lambda size: "7" + " " * (size - 1), lambda size: "7"),
        (lambda size: "a" * size, lambda size: "a" * size),
        (lambda size: "(" * (size - 988) + "7" + ")" * (size - 988), lambda size: "7"),
    ],
    ids=["1,000 characters and spaces", "1,000 letters", "12 brackets"],
)
def test_long_and_deep_texts(answer, label) -> None:
    assert are_equal(answer(1000), label(1000))
    assert are_equal(label(1000), answer(1000))
    assert not are_equal(answer(1001), label(1001))
    assert not are_equal(label(1001), answer(1001))


def test_characters_that_stand_for_many_count_as_many() -> None:
    assert are_equal("\ufdfa" * 55, "\ufdfa" * 55)
    assert not are_equal("\ufdfa" * 56, "\ufdfa" * 56)


def test_numbers_have_200_digits() -> None:
    assert are_equal("1" * 200, "1" * 200 + ".0")
    assert not are_equal("1" * 201, "1" * 201 + ".0")


def test_lists_have_32_parts() -> None:
    parts = [str(part) for part in range(33)]
    assert are_equal(",".join(parts[:32]), ",".join(reversed(parts[:32])))
    assert not are_equal(",".join(parts), ",".join(reversed(parts)))
    assert not are_equal(rf"\{{{','.join(parts[:32])}\}}", rf"\{{{','.join([*parts[:32], '0'])}\}}")


@pytest.mark.parametrize(
    ("last", "first"),
    [
        ("x^{9999}", "x^{10000}"),
        ("(x^{100})^{100}", "(x^{73})^{137}"),
        ("(x^{9999})^1", "(x^{9999})^2"),
        ("9999!x", "10000!x"),
    ],
)
def test_powers_and_factorials(last: str, first: str) -> None:
    assert same_value(last, f"{last}+0")
    assert not same_value(first, f"{first}+0")


def test_expressions_have_60_commands_and_matrices_64_signs_between_cells() -> None:
    assert same_value("+".join([r"\pi"] * 60), r"60\pi")
    assert not same_value("+".join([r"\pi"] * 61), r"61\pi")
    assert same_value(_cells(64), _cells(64).replace("1", r"\frac{2}{2}", 1))
    assert not same_value(_cells(65), _cells(65).replace("1", r"\frac{2}{2}", 1))


def test_line_breaks_of_a_matrix_are_no_commands() -> None:
    column = r"\\".join("1" * 64)
    matrix = rf"\begin{{pmatrix}}{column}\end{{pmatrix}}"
    assert same_value(matrix, matrix.replace("1", r"\frac{2}{2}", 1))


@pytest.mark.parametrize("character", ["\x00", "\x08", "\ud800"])
def test_control_characters_and_halves_of_characters_are_no_answer(character: str) -> None:
    assert not are_equal(f"yes{character}", f"yes{character}")

"""Values of expressions: read before they are needed, and compared for all values of their letters."""

from __future__ import annotations

import pytest

from posttrain.rl.reward.expression import read_expression, same_value, warm_up


def test_a_warm_reader_has_read_a_root_a_function_and_a_matrix() -> None:
    read_expression.cache_clear()
    warm_up()
    assert read_expression.cache_info().currsize == 3
    assert all(read_expression(text) is not None for text in (r"\frac{\sqrt{2}}{3}-x^2", r"2\pi+\sin x"))
    assert read_expression.cache_info().hits == 2


def test_a_letter_that_does_not_count_may_stand_on_one_side_alone() -> None:
    assert same_value(r"\frac{xy+2y}{y}", "x+2")
    assert same_value("x+2", r"\frac{xy+2y}{y}")
    assert not same_value(r"\frac{xy+2y}{y}", "x+3")


@pytest.mark.parametrize("constant", [r"\frac{\sqrt{13}}{2}", r"\sqrt{3.25}"])
def test_one_point_at_which_both_are_real_is_not_enough(constant: str) -> None:
    """Of the points that are tried, the root is real at -17/4 alone, where it is the constant."""
    assert not same_value(r"\sqrt{-x-1}", constant)
    assert same_value(r"\sqrt{-x-1}", r"\sqrt{-(x+1)}")

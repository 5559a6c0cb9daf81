"""What of a text of asserts the solution's sandbox is given."""

from __future__ import annotations

import pytest

from posttrain.rl.reward.assert_tests import split_asserts


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("x = 5\nassert f(1) == x\nx = f(2)\nassert x == 7", ["f(1)", "x = f(2)", "x"]),
        ("x = 5\nassert f(1) == x\nx = 2\nassert f(x) == 7", ["f(1)", "x = 2", "f(x)"]),
        ("x = 5\nassert f(1) == x\nassert f(lambda x: x) == 7", ["f(1)", "f(lambda x: x)"]),
        ("x = 5\ny = [x for x in (1, 2)]\nassert f(x, y) == 7", ["x = 5", "y = [x for x in (1, 2)]", "f(x, y)"]),
        ("x = {}\nx[0] = 5\nassert f(x) == 7", ["x = {}", "x[0] = 5", "f(x)"]),
        ("x = 5\ny = lambda: x\nx = 6\nassert f(y) == 7", ["x = 5", "y = lambda: x", "x = 6", "f(y)"]),
        (
            "x = 5\ny = lambda: [x for _ in (1, 2)]\nx = 6\nassert f(y) == 7",
            ["x = 5", "y = lambda: [x for _ in (1, 2)]", "x = 6", "f(y)"],
        ),
        ("x = 5\ny = lambda: x\nassert f(1) == y()", ["f(1)"]),
        ("x = 5\nassert f(lambda: x) == 7\nx = 6\nassert f(1) == x", ["x = 5", "f(lambda: x)", "f(1)"]),
        ("x = 5\nx = x + 1\nassert f(x) == 7", ["x = 5", "x = x + 1", "f(x)"]),
    ],
)
def test_the_solution_is_given_what_its_later_steps_read(text: str, steps: list[str]) -> None:
    assert [step for _, step in split_asserts(text).steps] == steps

import time

import pytest

from posttrain.config.reward import BUILT_IN
from posttrain.reward.answer import Answer
from posttrain.reward.grade import GRADERS
from posttrain.reward.grade import grade as grade_answer


def grade(name, response, label):
    return grade_answer(name, Answer(response, label)).score


EXACT = [
    ("1134", "1134", 1.0),
    (" 1134\n", "1134", 1.0),
    ("1134 ", " 1134", 1.0),
    ("4311", "1134", 0.0),
    ("01134", "1134", 0.0),
    ("", "1134", 0.0),
    ("11 34", "1134", 0.0),
]


@pytest.mark.parametrize(("response", "label", "score"), EXACT)
def test_exact_match(response, label, score):
    assert grade("exact_match", response, label) == score


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{1e999999999}",
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{" + "9" * 200_000 + "}",
        r"\boxed{" * 20_000,
        "1," * 200_000,
        "1 / " * 100_000,
        "-" * 200_000,
    ],
)
def test_hostile_text_is_graded_in_no_time(response):
    started = time.perf_counter()
    assert grade("math_answer", response, "42") == 0.0
    assert time.perf_counter() - started < 1.0


def test_the_names_that_a_configuration_may_have():
    assert set(BUILT_IN) == GRADERS.keys()

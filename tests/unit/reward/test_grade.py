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

MATH = [
    # the last box
    (r"so \boxed{42}", "42", 1.0),
    (r"\boxed{41} no, \boxed{42}", "42", 1.0),
    (r"\boxed{42} no, \boxed{41}", "42", 0.0),
    (r"\boxed{42}, of the 7 we had", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\dfrac{3}{4}}", r"\frac{6}{8}", 1.0),
    (r"\boxed{\frac12}", "1/2", 1.0),
    (r"\boxed{-\frac{1}{2}}", "-0.5", 1.0),
    (r"\boxed{\frac{-1}{2}}", "-0.5", 1.0),
    (r"\boxed{-\frac{-1}{2}}", "0.5", 1.0),
    # a mixed number is no fraction of ours: it is not read as 11/2
    (r"\boxed{1\frac{1}{2}}", "11/2", 0.0),
    (r"\boxed{\text{Monday}}", r"\text{Monday}", 1.0),
    (r"\boxed{x^{2}+1}", "x^{2}+1", 1.0),
    (r"\boxed{x^{2}+1}", "x^{2}-1", 0.0),
    (r"\boxed{}", "", 0.0),
    (r"\boxed{ 7 }", "7", 1.0),
    (r"\boxed{\$5}", "5", 1.0),
    (r"\boxed{$5$}", "5", 1.0),
    (r"\boxed{50\%}", "50", 1.0),
    # a box that is not closed is none
    (r"1 or \boxed{2", "2", 0.0),
    # the last number
    ("the answer is 42", "42", 1.0),
    ("first 41, then 42.", "42", 1.0),
    ("first 42, then 41.", "42", 0.0),
    ("it is 1,234,567 metres", "1234567", 1.0),
    ("one of 1,2", "2", 0.0),
    ("one of 1,2", "12", 0.0),
    ("-3", "-3", 1.0),
    ("3", "-3", 0.0),
    ("3.50", "3.5", 1.0),
    (".5", "1/2", 1.0),
    ("2/4", "0.5", 1.0),
    ("2 / 4", "1/2", 1.0),
    ("0.3333", "1/3", 0.0),
    ("0.1", r"\boxed{0.1}", 1.0),
    ("no number", "42", 0.0),
    ("", "", 0.0),
    ("5/0", "0", 0.0),
    # exact: no rounding of large or close numbers
    ("9007199254740993", "9007199254740992", 0.0),
    ("0.30000000000000004", "0.3", 0.0),
    # text that a computer algebra system would compute is only text
    (r"\boxed{6*7}", "42", 0.0),
    (r"\boxed{__import__('os').getpid()}", "42", 0.0),
]


@pytest.mark.parametrize(("response", "label", "score"), EXACT)
def test_exact_match(response, label, score):
    assert grade("exact_match", response, label) == score


@pytest.mark.parametrize(("response", "label", "score"), MATH)
def test_math_answer(response, label, score):
    assert grade("math_answer", response, label) == score


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

import time

import pytest

from posttrain.config.reward import BUILT_IN
from posttrain.rl.reward import code, of_environment
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.grade import GRADERS, grade
from posttrain.rl.reward.graders import BuiltIn
from posttrain.rl.reward.shape import ShapeSettings

EXACT = [
    ("1134", "1134", 1.0),
    (" 1134\n", "1134", 1.0),
    ("1134 ", " 1134", 1.0),
    ("4311", "1134", 0.0),
    ("01134", "1134", 0.0),
    ("", "1134", 0.0),
    ("11 34", "1134", 0.0),
]

# What `math_answer` has always said, but for the cases that pairs.jsonl decides anew.
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
    # a mixed number is one and a half, not 11/2
    (r"\boxed{1\frac{1}{2}}", "11/2", 0.0),
    (r"\boxed{1\frac{1}{2}}", "3/2", 1.0),
    (r"\boxed{\text{Monday}}", r"\text{Monday}", 1.0),
    (r"\boxed{x^{2}+1}", "x^{2}+1", 1.0),
    (r"\boxed{x^{2}+1}", "x^{2}-1", 0.0),
    (r"\boxed{}", "", 0.0),
    (r"\boxed{ 7 }", "7", 1.0),
    (r"\boxed{$5$}", "5", 1.0),
    (r"\boxed{50\%}", "50", 1.0),
    # a box that is not closed is no answer
    (r"1 or \boxed{2", "2", 0.0),
    # the last number
    ("the answer is 42", "42", 1.0),
    ("first 41, then 42.", "42", 1.0),
    ("first 42, then 41.", "42", 0.0),
    ("it is 1,234,567 metres", "1234567", 1.0),
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
    # a product that is left to compute is not the number
    (r"\boxed{6*7}", "42", 0.0),
    (r"\boxed{__import__('os').getpid()}", "42", 0.0),
]


@pytest.mark.parametrize(("response", "label", "score"), EXACT)
def test_exact_match(response, label, score):
    assert grade("exact_match", Answer(response, label)).score == score


@pytest.mark.parametrize(("response", "label", "score"), MATH)
def test_math_answer(response, label, score):
    assert grade("math_answer", Answer(response, label)).score == score


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
    started = time.thread_time()  # of a CPU: what else the machine does is no fault of the text
    assert grade("math_answer", Answer(response, "42")).score == 0.0
    assert time.thread_time() - started < 1.0


def test_the_names_that_a_configuration_may_have():
    assert set(BUILT_IN) == {*GRADERS, code.NAME, of_environment.NAME}


@pytest.mark.parametrize("name", sorted(GRADERS))
def test_without_a_label_a_grader_applies_only_if_it_needs_none(name):
    score = grade(name, Answer("1", num_tokens=1)).score
    assert (score is not None) == (name in {"format", "length", "overlong", "repetition"})
    assert GRADERS[name].needs_label == (score is None)


def test_what_could_hang_has_a_process():
    assert {name for name, grader in GRADERS.items() if not grader.is_instant} == {
        *("math", "math_answer", "math_dapo", "math_deepscaler", "format", "reasoning_gym"),
    }


def test_a_built_in_grader_has_its_settings():
    settings = ShapeSettings(target_tokens=10)
    (found,) = BuiltIn("length", settings)((Answer("", num_tokens=5),))
    assert found.score == 0.5


def test_an_answer_of_which_nothing_else_is_known():
    answer = Answer("42")
    assert (answer.label, answer.num_tokens, answer.is_truncated, answer.is_chat) == (None, 0, False, True)

"""Answers in prompts are found, and labels that stand there by chance or by the task's nature are not."""

from __future__ import annotations

import random

import pytest

from posttrain.rl.data.label_leak import _is_in, check_leak
from posttrain.types import Prompt

DRAW = random.Random(0)


def _prompts(text, labels, num=100):
    return [
        Prompt(
            i,
            ({"role": "system", "content": "7 yes"}, {"role": "user", "content": text(i, labels[i % len(labels)])}),
            labels[i % len(labels)],
        )
        for i in range(num)
    ]


DIGITS = [str(i) for i in range(10)]
NUMBERS = [str(100 + 7 * i) for i in range(100)]
OTHERS = [str(DRAW.randrange(10)) for _ in range(100)]
LEAKS = {
    "digits": (lambda i, label: f"What is {OTHERS[i]} + {OTHERS[-i]}? The answer is {label}.", DIGITS),
    "numbers": (lambda i, label: f"Count to it. #### {label}", NUMBERS),
    "texts": (lambda i, label: f"Q{i}\nA: {label.upper()}  ", ["the quick fox", "a slow dog"]),
    "choices": (lambda i, label: f"A, B, C or D? ({label})", ["(A)", "(B)", "(C)", "(D)"]),
    "objects": (lambda i, label: label["target"][0], [{"target": [name], "style": 3} for name in ("ab", "cd")]),
    "messages": (lambda i, label: label["content"], [{"role": "assistant", "content": f"it is {i}"} for i in DIGITS]),
}
FINE = {
    "digits by chance": (lambda i, label: f"What is {OTHERS[i]} + {OTHERS[-i]}?", DIGITS),
    "choices": (lambda i, label: "A, B, C or D? Answer yes or no.", ["A", "B", "C", "D", "yes", "no"]),
    "parts of numbers": (lambda i, label: f"What follows {label}5, 3.{label}, {label}.2 and x{label}?", DIGITS),
    "one label": (lambda i, label: "Is it? Answer yes.", ["yes"]),
    "in the system prompt": (lambda i, label: "Hm?", ["7", "yes"]),
    "one of two texts": (lambda i, label: "Is it a1 or a2?", [["a1", "b1"], ["a2", "b2"]]),
    "no texts": (lambda i, label: "true null", [True, None, [], {}]),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused(name):
    (problem,), warnings = check_leak("data.label_key", _prompts(*LEAKS[name]), 0.5)
    assert warnings == []
    assert (problem.code, problem.key) == ("label-in-prompt", "data.label_key")
    assert all(datum in problem.value for datum in ("100 of 100 rows", "row 1"))
    assert "reward.max_label_in_prompt=1" in problem.remedy


@pytest.mark.parametrize("name", FINE)
def test_coincidence_is_none(name):
    assert check_leak("data.label_key", _prompts(*FINE[name]), 0.5) == ([], [])


def _mixed(share, num=100):
    prompts = _prompts(lambda i, label: f"Q {label}" if i < share * num else "Q", NUMBERS, num)
    return [len(found) for found in check_leak("k", prompts, 0.5)]


@pytest.mark.parametrize(("share", "found"), [(0.2, [0, 0]), (0.21, [0, 1]), (0.5, [0, 1]), (0.51, [1, 0])])
def test_a_part_of_the_rows(share, found):
    assert _mixed(share) == found


def test_few_rows_are_told_and_not_refused():
    assert _mixed(1, 7) == [0, 1]
    assert _mixed(1, 8) == [1, 0]


def test_of_many_rows_a_thousand_are_looked_at():
    """Every second one of 2,500, as far as they go; the first two of them hold no label, the last another's."""
    prompts = _prompts(lambda i, label: {0: "", 2: "", 1998: NUMBERS[0]}.get(i, label), NUMBERS, 2500)
    (problem,), _ = check_leak("k", prompts, 0.5)
    assert problem.value == (
        "is in its own prompt in 997 of 1000 rows that were looked at, first in row 5, and another row's label in 1"
    )
    assert problem.allowed.startswith("at most 50% more often")


def test_a_prompt_with_its_own_and_the_next_label_is_no_leak():
    assert check_leak("k", _prompts(lambda i, label: f"{label} {NUMBERS[(i + 1) % 100]}", NUMBERS), 0.5) == ([], [])


def test_the_key_allows_it():
    prompts = _prompts(*LEAKS["numbers"])
    assert [len(found) for found in check_leak("k", prompts, 1.0)] == [0, 1]
    assert [len(found) for found in check_leak("k", prompts, 0.1)] == [1, 0]
    assert check_leak("k", [], 0.5) == ([], [])


@pytest.mark.parametrize(
    ("label", "text", "is_in"),
    [
        ("4", "is 4.", True),
        ("4", "4", True),
        ("4", "24 or 42, 4.5, 1,4, 4,000", False),
        ("1,234.5", "it was 1,234.5!", True),
        ("四", "答案是四。", True),
        ("$x$", "a$x$b", True),
        ("-4", "x=-4", True),
        ("yes", "yesterday", False),
    ],
)
def test_a_label_as_a_word(label, text, is_in):
    assert _is_in(label, text) is is_in

"""Answers labelled by hand before the graders first read them (pairs.jsonl; `git log --follow` shows the order)."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import sympy

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.equality import are_equal
from posttrain.rl.reward.grade import grade

PAIRS = [json.loads(line) for line in Path(__file__).with_name("pairs.jsonl").read_text().splitlines()]
POINTS = (sympy.Rational(7, 5), sympy.Rational(13, 4), sympy.Rational(29, 8))


def test_there_are_enough_of_all_kinds() -> None:
    assert len(PAIRS) >= 300
    assert sum(pair["verdict"] == 0 for pair in PAIRS) >= 120
    assert sum(pair.get("source", "").startswith("https://github.com/") for pair in PAIRS) >= 60
    assert Counter(pair["convention"] for pair in PAIRS).keys() == {
        *("math", "math_answer", "math_dapo", "math_deepscaler"),
    }


@pytest.mark.parametrize("convention", ["math", "math_answer", "math_dapo", "math_deepscaler"])
def test_graders_agree_with_the_labels(convention: str) -> None:
    wrong = [
        (pair["id"], pair["response"], pair["label"], pair["verdict"])
        for pair in PAIRS
        if pair["convention"] == convention
        and grade(convention, Answer(pair["response"], pair["label"])).score != pair["verdict"]
    ]
    assert not wrong


def test_a_truncated_answer_is_none() -> None:
    right = [pair for pair in PAIRS if pair["verdict"] and isinstance(pair["label"], str)][::10]
    for pair in right:
        assert grade(pair["convention"], Answer(pair["response"], pair["label"], is_truncated=True)).score == 0.0


def test_equality_is_symmetric() -> None:
    lopsided = []
    for pair in PAIRS[::2]:
        content = pair["response"].removeprefix("So it is \\boxed{").removesuffix("}.")
        if pair["convention"] == "math" and content != pair["response"] and isinstance(pair["label"], str):
            label = pair["label"]
            if "boxed" not in label and "####" not in label and are_equal(label, content) != bool(pair["verdict"]):
                lopsided.append((pair["id"], content, label))
    assert not lopsided


def test_a_second_judge_agrees_with_the_labels() -> None:
    """SymPy at random points, from expressions written by hand: no LaTeX is read."""
    judged = [pair for pair in PAIRS if "sympy" in pair]
    assert len(judged) >= 50
    wrong = []
    for pair in judged:
        left, right = (sympy.sympify(text) for text in pair["sympy"])
        letters = sorted(left.free_symbols | right.free_symbols, key=str)
        same = all(
            math.isclose(abs(a - b), 0, abs_tol=float(1e-9 * max(1e-300, abs(a), abs(b))))
            for point in POINTS
            for a, b in [[complex(side.subs({x: point + k for k, x in enumerate(letters)})) for side in (left, right)]]
        )
        if same != bool(pair["verdict"]):
            wrong.append((pair["id"], pair["sympy"], pair["verdict"]))
    assert not wrong

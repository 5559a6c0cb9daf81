import pytest
import torch
from tests.support.rejections import rejected

from posttrain.config.reward_sum import MAX_NUMBER, Term, has_passed, is_usable, parse_reward, total


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("math", (Term("math"),)),
        ("math + 0.2*format", (Term("math"), Term("format", 0.2))),
        ("math+.5 * format+-1e-1*length", (Term("math"), Term("format", 0.5), Term("length", -0.1))),
        ("mine/rewards.py:score + 2*math", (Term("mine/rewards.py:score"), Term("math", 2.0))),
    ],
)
def test_sum_is_read(text: str, terms: tuple[Term, ...]) -> None:
    assert parse_reward(text) == terms


def test_own_functions_are_columns_by_their_names() -> None:
    own, built_in = parse_reward("mine/rewards.py:score + math")
    assert (own.is_own, own.column) == (True, "score")
    assert (built_in.is_own, built_in.column) == (False, "math")


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("not-a-reward-sum", ["", "math +", "math format", "nan*math", "2*", "*x"]),
        ("reward-weight", ["0*math", "1e999*math"]),
        ("named-twice", ["a.py:f + b.py:f", "math + math"]),
    ],
)
def test_what_is_no_sum_is_refused(code: str, texts: list[str]) -> None:
    for text in texts:
        with rejected(code, key="data.reward"):
            parse_reward(text)


@pytest.mark.parametrize(
    ("text", "code", "data"),
    [
        ("math +", "not-a-reward-sum", ["WEIGHT*GRADER"]),
        ("0*math + f", "reward-weight", ["leave math out"]),
        ("math + math + f", "named-twice", ["math would be one column"]),
    ],
)
def test_a_refusal_says_what_is_allowed_and_what_to_do(text: str, code: str, data: list[str]) -> None:
    with rejected(code, repr(text), "'math + 0.2*format'", *data, key="data.sources.a.reward"):
        parse_reward(text, "data.sources.a.reward")


@pytest.mark.parametrize(
    ("scores", "reward", "passes"),
    [
        ({"math": 1.0, "format": 0.0}, -1.0, True),
        ({"math": 0.5, "format": 1.0}, 2.0, False),
        ({"math": None, "format": 1.0}, 0.2, True),
        ({"math": None}, 1.0, True),
        ({}, 0.9, False),
    ],
)
def test_the_first_grader_that_applies_decides_what_passes(scores, reward: float, passes: bool) -> None:
    assert has_passed(scores, reward) is passes


def test_what_does_not_apply_adds_nothing() -> None:
    terms = parse_reward("math + 0.2*format")
    assert total(terms, {"math": 1.0, "format": 0.5}) == pytest.approx(1.1)
    assert total(terms, {"math": None, "format": 0.5}) == pytest.approx(0.1)
    assert total(terms, {"math": None, "format": None}) is None


@pytest.mark.parametrize(
    ("text", "scores", "reason"),
    [
        ("2*own", {"own": 1.7e308}, r"2\*own is inf with a score of 1.7e\+308"),
        ("own + -2*other", {"own": 1.7e308, "other": 1.7e308}, "1\\*own is 1.7e"),
        ("own", {"own": float("nan")}, "own is nan"),
        ("own + other", {"own": 6e37, "other": 6e37}, r"1\*own = 6e\+37 \+ 1\*other = 6e\+37 add up to 1.2e\+38"),
        ("own", {"own": 1e39}, "lower the weight, or scale"),
    ],
)
def test_a_reward_that_fp32_does_not_hold_is_an_error(text: str, scores: dict[str, float], reason: str) -> None:
    with pytest.raises(OverflowError, match=reason):
        total(parse_reward(text), scores)


def test_differences_of_usable_rewards_and_twice_that_are_finite_in_fp32() -> None:
    assert is_usable(MAX_NUMBER)
    assert is_usable(-MAX_NUMBER)
    assert not is_usable(MAX_NUMBER * 1.0001)
    largest = torch.tensor([MAX_NUMBER, -MAX_NUMBER], dtype=torch.float32)
    assert (largest[0] - largest[1]).isfinite()
    assert total(parse_reward("own + other"), {"own": MAX_NUMBER, "other": -MAX_NUMBER}) == 0.0

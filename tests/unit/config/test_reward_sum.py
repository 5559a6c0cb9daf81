import pytest

from posttrain.config.reward_sum import Term, parse_reward, total
from posttrain.errors import ConfigError


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
    "text",
    ["", "math +", "math format", "0*math", "1e999*math", "nan*math", "a.py:f + b.py:f", "math + math", "2*", "*x"],
)
def test_what_is_no_sum_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.reward"):
        parse_reward(text)


def test_what_does_not_apply_adds_nothing() -> None:
    terms = parse_reward("math + 0.2*format")
    assert total(terms, {"math": 1.0, "format": 0.5}) == pytest.approx(1.1)
    assert total(terms, {"math": None, "format": 0.5}) == pytest.approx(0.1)
    assert total(terms, {"math": None, "format": None}) is None

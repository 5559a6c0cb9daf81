"""Services and judges that are refused when planning, without a word of what may be secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.canaries import CANARIES, found_in

from posttrain.config.load import merge
from posttrain.config.patterns import check_pattern
from posttrain.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "config"
SECRET = CANARIES["HF_TOKEN"]
FAR, WISE = "reward.services.far", "reward.judges.wise"
GOOD = f"{FAR}.url=http://host:8000/score"


def keys_of(words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        merge({"model": "tiny", "site": "local", "set": words}, CONFIG)
    assert not found_in(str(refused.value))
    return [problem.key for problem in refused.value.problems]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "'http://ho st'",
        f"http://me:{SECRET}@host/score",
        f"http://{SECRET}@host/score",
        f"https://host/score?key={SECRET}",
        f"https://host/score#{SECRET}",
        f"ftp://me:{SECRET}@host:port/?key={SECRET}",
    ],
)
def test_an_address_that_is_none_or_has_a_secret_in_it(url: str) -> None:
    assert keys_of(f"{FAR}.url={url}") == [f"{FAR}.url"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/score", "https://host", "http://[::1]:80/v1", "http://a_b/x@y"])
def test_an_address(url: str) -> None:
    found = merge({"model": "tiny", "site": "local", "set": f"{FAR}.url={url}"}, CONFIG)
    assert found.config.reward.services["far"].url == url


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (f"{GOOD} {FAR}.token_variable={SECRET}", [f"{FAR}.token_variable"]),
        (f"{GOOD} {FAR}.token_variable=sk-{SECRET}", [f"{FAR}.token_variable"]),
        (f"{GOOD} {FAR}.batch_size=0", [f"{FAR}.batch_size"]),
        (f"{GOOD} {FAR}.deadline_seconds=0", [f"{FAR}.deadline_seconds"]),
        (f"{GOOD} data.reward=fart", ["data.reward"]),
        ("reward.services.math.url=http://host", ["reward.services.math"]),
        ("reward.services.1st.url=http://host", ["reward.services.1st"]),
        (f"{WISE}.url=http://host/v1", [f"{WISE}.model", f"{WISE}.prompt_file"]),
        (f"{GOOD} {FAR}.urls=x", [f"{FAR}.urls"]),
        ("reward.format_pattern=(a+)+b", ["reward.format_pattern"]),
    ],
)
def test_other_settings(words: str, keys: list[str]) -> None:
    assert keys_of(words) == keys


@pytest.mark.parametrize("pattern", ["'(a+)+'", "'('", "a+", "'(a)(b)'"])
def test_a_verdict_is_read_by_one_group_in_bounded_time(pattern: str) -> None:
    judge = f"{WISE}.url=http://host/v1 {WISE}.model=m {WISE}.prompt_file=x"
    assert keys_of(f"{judge} {WISE}.verdict_pattern={pattern}") == [f"{WISE}.verdict_pattern"]


def test_one_name_for_two_graders() -> None:
    judge = "reward.judges.far.url=http://host/v1 reward.judges.far.model=m reward.judges.far.prompt_file=x"
    assert keys_of(f"{GOOD} {judge}") == ["reward.judges.far"]


@pytest.mark.parametrize("pattern", ["(a+)+", "(a*b?)*", "(?:x+y)+z", "((ab)*c*)*", "(", "[", "*a"])
def test_a_pattern_that_is_none_or_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*'(: | repeats a repetition)"):
        check_pattern(pattern)


def test_groups_are_counted() -> None:
    assert [check_pattern(pattern) for pattern in ("a", "(a)", "(?:a)(b)(?P<c>c)")] == [0, 1, 2]

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.config.load import merge
from posttrain.config.overrides import parse_overrides
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).parents[3] / "config"
REVISION = "model.source.revision"


@pytest.mark.parametrize("text", ["12e4567", "0123", "1_000", "on", "2026-11-28", "1:30", "007", "0x1f", ".5", "nan"])
def test_text_stays_as_it_was_written(text: str) -> None:
    assert parse_overrides(f"{REVISION}={text}") == {REVISION: text}
    assert parse_overrides(f"{REVISION}=\"'{text}'\"") == {REVISION: text}, "quotes are YAML's"
    assert parse_overrides(f"data.sources.mine.task={text} optimizer.lr=1e-6") == {
        "data.sources.mine.task": text,
        "optimizer.lr": 1e-6,
    }


def test_no_value_is_no_text() -> None:
    assert parse_overrides(f"{REVISION}=null") == {REVISION: None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "training.num_steps=0100",
            "training.num_steps: 0100, which YAML reads as 64; allowed: a decimal number, or text in quotes; write 64, "
            'or "0100"',
        ),
        ("training.num_steps=1:30", "training.num_steps: 1:30, which YAML reads as 90; allowed: a decimal number"),
        (
            "a.b={x: 1, x: 2, x: 3}",
            "a.b: 'x' for the second time; the first is on line 1; allowed: each key once; join the two, or delete one",
        ),
        ("a=[", "while parsing a flow node"),
        ("a", "'a' has no '=' behind a key"),
        ("=1", "'=' has no '=' behind a key"),
    ],
)
def test_values_that_yaml_would_misread_are_rejected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        parse_overrides(f"'{text}'")
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("value", [12e4567, 83, True, 1.5])
def test_what_yaml_made_of_text_in_a_file_is_rejected(value: object) -> None:
    request = {"model": {"name": "tiny", "source": {"revision": value}}, "site": "local"}
    with pytest.raises(ConfigError) as caught:
        merge(request, CONFIG_DIR)
    assert [(problem.key, problem.remedy) for problem in caught.value.problems] == [(REVISION, "write it in quotes")]


@pytest.mark.parametrize("value", [12e4567, True, 1.5])
def test_items_of_a_list_are_text_or_whole_numbers(value: object) -> None:
    def names_of(*names: object) -> list[str]:
        return merge(
            {"model": "tiny", "site": {"name": "local", "node_names": [*names]}}, CONFIG_DIR
        ).config.site.node_names

    with pytest.raises(ConfigError) as caught:
        names_of("a", value)
    assert caught.value.problems[0].remedy == "write it in quotes"
    assert names_of("a", 83) == ["a", "83"]

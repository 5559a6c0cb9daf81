"""Rows of the table by hand, and how a setting of the planner is held against a script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.plan.resolve import resolve
from posttrain_import.planned_flags import as_plain, disagreement, emitted
from posttrain_import.row import Row, cells, row
from posttrain_import.script import Given

CONFIG_DIR = Path(__file__).parents[2] / "config"


def test_a_row_of_words() -> None:
    item = row("--first 1 2 --second --third=x", "a.b c.d", "one - two", "a note")
    assert item.theirs == ("--first 1 2", "--second", "--third=x")
    assert item.names == ("--first", "--second", "--third")
    assert (item.keys, item.here) == (("a.b", "c.d"), ("one", "", "two"))
    assert [item.key_of(name) for name in item.names] == ["a.b", "c.d", ""]
    assert [item.setting_of(name) for name in item.names] == ["one", "", "two"]
    assert cells(item) == ("`--first 1 2`, `--second`, `--third=x`", "`one`, `two`; a note", "`a.b`, `c.d`")


def test_defaults_of_a_row() -> None:
    item = Row(("X=1",))
    assert (item.names, item.key_of("X"), item.setting_of("X"), item.absent, item.late) == (("X",), "", "", None, False)
    assert cells(item) == ("`X=1`", "", "")
    assert row("A=1 B", told="told").names == ("A", "B")
    assert cells(row("A", here="x x", told="told", note="n"))[1] == "told; n"
    together = row("--a --b", "k.a k.b", convert=lambda given, values: {})
    assert [together.key_of(name) for name in together.names] == ["", ""]


@pytest.mark.parametrize(
    ("text", "plain"),
    [("0.70", 0.7), ("RMSNorm", "rmsnorm"), ("", True), ("True", True), ("false", False), ("none", None), (3, 3)],
)
def test_values_are_compared_as_what_they_are(text: Any, plain: Any) -> None:
    assert as_plain(text) == plain


@pytest.mark.parametrize(
    ("values", "ours", "expected"),
    [
        (("0.70",), [0.7], ""),
        (("0.7",), [0.8], "name is 0.8 here: note"),
        # Engines that prefill have another value than those that decode.
        (("2",), [1, 2], ""),
        (("3",), [1, 2, 1], "name is 1, 2 here: note"),
        ((), [True], ""),
        ((), [False], "name is False here: note"),
        (("false",), [None], ""),
        (("false",), [True], "name is True here: note"),
        (("true",), [0], "name is 0 here: note"),
        (("0",), None, ""),
        (("1",), None, "name is None here: note"),
        (("nsa",), ["dsa"], ""),
        (("dsa",), ["dsa"], ""),
        (("1", "2"), ["1 2"], ""),
    ],
)
def test_where_the_planner_says_something_else(values: tuple[str, ...], ours: Any, expected: str) -> None:
    item = row("--flag --other", here="name", note="note", renamed={"nsa": "dsa"})
    settings = {} if ours is None else {"name": ours}
    assert disagreement(item, Given("--flag", values, ""), settings) == expected
    assert disagreement(item, Given("--other", values, ""), settings) == ""
    assert disagreement(row("--flag", here="name"), Given("--flag", ("x",), ""), {}) == "name is None here"


def test_settings_of_both_kinds_of_engine() -> None:
    config = resolve({"model": "glm5", "site": "local"}, CONFIG_DIR).config
    settings = emitted(config)
    assert settings["tensor_model_parallel_size"] == [4]
    assert sorted(settings["--disaggregation-mode"]) == ["decode", "prefill"]
    assert len(settings["--tp-size"]) == 2

"""Flags among words, and what several calls of the training have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain_import.script import (
    MOST_BYTES,
    MOST_STEPS,
    PROGRAM,
    UNSET,
    Budget,
    Given,
    Word,
    flags_of,
    merged,
    read_text,
    split_words,
)


def words(text: str, **whys: str) -> list[Word]:
    return [Word(word, f"run.sh:{place}", whys.get(word, "")) for place, word in enumerate(text.split(), 1)]


def test_a_flag_has_the_words_behind_it() -> None:
    script = flags_of(words("lost --a 1 2 --b --c=3 4 --a 5 -x"))
    assert script.flags == {
        "--a": Given("--a", ("5", "-x"), "run.sh:8"),
        "--b": Given("--b", (), "run.sh:5"),
        "--c": Given("--c", ("3", "4"), "run.sh:6"),
    }
    assert script.unread == ()


def test_what_is_not_known_of_a_value_is_not_known_of_its_flag() -> None:
    script = flags_of(words("first --a 1 x --b", first="because", x="why"))
    assert script.flags["--a"] == Given("--a", ("1", "x"), "run.sh:2", "why")
    assert script.flags["--b"].why == ""
    assert script.unread == (Given("first", (), "run.sh:1", "because"),)


def test_a_value_belongs_to_the_flag_before_one_that_may_be_missing() -> None:
    script = flags_of(words("--z 0 --a 1 --b --c 2", **{"--b": "branch b", "--c": "branch c"}))
    assert {name: given.why for name, given in script.flags.items()} == {
        "--z": "",
        "--a": "branch b",
        "--b": "branch b",
        "--c": "branch c",
    }
    one = flags_of(words("--a 1 --b 2", **{"--b": "branch"}))
    assert {name: given.why for name, given in one.flags.items()} == {"--a": "branch", "--b": "branch"}
    # With its flag a value is missing, too.
    known = flags_of(words("--a 1 --b 2", **{"--b": "branch", "2": "branch"}))
    assert known.flags["--a"].why == ""


@pytest.mark.parametrize(("has_lists", "why"), [(False, ""), (True, "$L in run.sh:3 may give it again: made")])
def test_a_list_may_hold_any_flag(has_lists: bool, why: str) -> None:
    before, after = words("--a 1"), [Word("--b", "run.sh:4")]
    script = flags_of([*before, Word("$L", "run.sh:3", "made", is_list=True), *after], has_lists)
    assert (script.flags["--a"].why, script.flags["--b"].why) == (why, "")
    assert script.unread == (Given("$L", (), "run.sh:3", "made"),)
    unset = flags_of([*before, Word("$L", "run.sh:3", f"{UNSET} L", is_list=True)], has_lists)
    assert unset.flags["--a"].why == ""
    known = flags_of([Word("--a", "run.sh:1", "before"), Word("$L", "run.sh:3", "made", is_list=True)], has_lists)
    assert known.flags["--a"].why == "before"


def test_what_may_be_split_is_the_value_of_a_flag_that_has_none_yet() -> None:
    split = Word("$X", "run.sh:9", "why", is_split=True)
    assert flags_of([*words("--a"), split]).flags["--a"].values == ("$X",)
    script = flags_of([*words("--a 1"), split])
    assert (script.flags["--a"].values, script.flags["--a"].why) == (("1",), "")
    assert [given.name for given in script.unread] == ["$X"]


def test_calls_of_one_script_are_told_where_they_differ() -> None:
    first, second = words("--a 1 --b 2 --c 3"), words("--a 1 --b 4", **{"4": "why"})
    script = merged([first, second])
    assert script.flags["--a"].why == ""
    assert script.flags["--b"].why == "why"
    assert script.flags["--c"].why == "the script starts the training more than once, with other flags: run.sh:5"
    again = merged([words("--x 0 --a 1"), words("--a 2")])
    assert again.flags["--a"].why.endswith("with other flags: run.sh:1, run.sh:3")
    assert again.flags["--a"].values == ("1",)
    lost = [Word("$L", "run.sh:3", "made", is_list=True)]
    assert len(merged([lost, lost]).unread) == 1
    assert merged([]).flags == {}


def test_words_of_a_command_keep_their_place_and_spelling() -> None:
    assert [*split_words("""a "b c"d 'e\\' --f='g h' \\"x""")] == [
        (0, "a", "a"),
        (2, '"b c"d', "b cd"),
        (9, "'e\\'", "e\\"),
        (14, "--f='g h'", "--f=g h"),
        (24, '\\"x', '"x'),
    ]
    assert [*split_words("it's")] == [(0, "it's", "it's")], "a quotation mark that nothing ends"
    assert [*split_words("''")] == [(0, "''", "")]


def test_a_budget_is_spent_to_its_last_step() -> None:
    budget = Budget()
    budget.spend(MOST_STEPS - 1)
    budget.spend(1)
    with rejected("script-too-long"):
        budget.spend(1)


def test_a_script_may_be_so_long(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(b"a\r\n" + b"b" * (MOST_BYTES - 3))
    assert read_text(path).startswith("a\nb")
    path.write_bytes(b"a" * (MOST_BYTES + 1))
    for place, datum in ((path, "131072 bytes"), (tmp_path, ""), (tmp_path / "x", "")):
        with rejected("file-unreadable", datum, key=str(place)):
            read_text(place)
    for content, datum in ((b"\xff\xfe", "UTF-8"), (b"a\0b", "binary")):
        path.write_bytes(content)
        with rejected("file-unreadable", datum, key=str(path)):
            read_text(path)


def test_programs_that_train() -> None:
    names = ("train.py", "/x/train_async.py", "x/train.py", "mytrain.py", "train.py.bak", "train_sync.py")
    assert [bool(PROGRAM.search(name)) for name in names] == [True, True, True, False, False, False]

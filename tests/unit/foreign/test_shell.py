"""Bash scripts are read as bash would read them, as far as that needs nothing run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.foreign.script import Script
from posttrain.foreign.shell import read_shell


def read(folder: Path, text: str) -> Script:
    path = folder / "run.sh"
    path.write_text(text)
    return read_shell(path)


def value(folder: Path, word: str, before: str = "") -> tuple[tuple[str, ...], str]:
    """Return what a flag is given by a word, and why it is not known."""
    given = read(folder, f"{before}\npython3 train.py --flag {word}").flags["--flag"]
    return given.values, given.why


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("1e-6", ("1e-6",)),
        ("a b", ("a", "b")),
        ("'a  $X' \"b $X\"", ("a  $X", "b 5")),
        ("a\\ b", ("a b",)),
        ("$X", ("5",)),
        ("${X}00", ("500",)),
        ("${Y:-7}", ("7",)),
        ("${X:-7}", ("5",)),
        ("${Y:-${Z:-$X}}", ("5",)),
        ("$WORDS", ("a", "b")),
        ('"$WORDS"', ("a b",)),
        ("$((X * 2048 + 1))", ("10241",)),
        ("x#y # no part of it", ("x#y",)),
        ("1 \\\n  2", ("1", "2")),
        ("1 2>/dev/null >> log", ("1",)),
        ("1; other --flag 2", ("1",)),
        ("'${NO}'", ("${NO}",)),
        ('"a\\"b"', ('a"b',)),
        ("${ITEMS[@]}", ("c", "d e")),
    ],
)
def test_words_are_what_bash_makes_of_them(tmp_path: Path, word: str, values: tuple[str, ...]) -> None:
    before = "X=5 \nexport WORDS='a b'\nITEMS=(c # no item\n 'd e')"
    assert value(tmp_path, word, before) == (values, "")


@pytest.mark.parametrize(
    ("word", "before", "reason"),
    [
        ("$X", "", "the script does not set X"),
        ("$X", "X=$(date)", "$(date) is the output of a command, and none is run"),
        ("$X", "X=`date`", "`date` is the output of a command"),
        ('a$(date ")")b', "", "is the output of a command"),
        ("$X", "if true; then X=1; fi", "line 1 sets X only in the branch or loop of line 1"),
        ("$X", "X=1\nfor i in 1; do\n  X=2\ndone", "line 3 sets X only in the branch or loop of line 2"),
        ("$X", "[ -d a ] && X=1", "only if the command before '&&' says so"),
        ("$1", "", "$1 is not expanded"),
        ("${X%.*}", "X=1", "${X%.*} is not expanded"),
        ("$((X ** 99))", "X=9", "is not computed"),
        ("$((1/0))", "", "is not computed"),
    ],
)
def test_what_only_a_run_would_tell_is_not_guessed(tmp_path: Path, word: str, before: str, reason: str) -> None:
    values, why = value(tmp_path, word, before)
    assert reason in why
    assert values == (word,)


def test_a_flag_of_a_branch_stands_beside_the_one_that_is_sure(tmp_path: Path) -> None:
    script = read(tmp_path, 'A=(--lr 1)\nif [ "$X" ]; then\nA+=(--lr 2 --eps 3)\nfi\npython train.py ${A[@]} ${B[@]}')
    assert script.flags["--lr"].values == ("1",)
    assert script.flags["--eps"].why == "only in the branch or loop of line 2"
    unread = [(given.name, given.values, given.place) for given in script.unread]
    assert sorted(unread) == [("${B[@]}", (), "run.sh:5"), ("--lr", ("2",), "run.sh:3")]


@pytest.mark.parametrize(
    "command", ["ray job submit -- python3 train.py", "python3 /code/train_async.py", "torchrun train.py"]
)
def test_the_last_flag_counts_and_has_its_line(tmp_path: Path, command: str) -> None:
    script = read(tmp_path, f"A=(\n  --lr 1\n  --lr=2\n)\nother --lr 3\n{command} ${{A[@]}} &> log")
    given = script.flags["--lr"]
    assert (given.values, given.place) == (("2",), "run.sh:3")
    assert len(script.flags) == 1


def test_a_command_inside_of_a_word_and_arrays_without_one(tmp_path: Path) -> None:
    assert read(tmp_path, 'ssh node "cd x; python3 train.py --lr 1"').flags["--lr"].values == ("1",)
    assert read(tmp_path, "PERF_ARGS=(--lr 1)\nOTHER=(--eps 2)").flags.keys() == {"--lr"}


def test_a_sourced_script_is_read_beside_this_one_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "outside.sh").write_text("X=1")
    folder = tmp_path / "scripts"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "a.sh").write_text("source models/a.sh\nMODEL_ARGS=(\n--layers 4)")
    text = 'source "$(dirname "$0")/models/a.sh"\nsource ../outside.sh\npython3 train.py ${MODEL_ARGS[@]} --x $X'
    script = read(folder, text)
    assert script.flags["--layers"].place == "models/a.sh:3"
    assert script.flags["--x"].why == "the script does not set X"
    assert "source ../outside.sh" in [given.name for given in script.unread]


def test_heredocs_are_no_commands(tmp_path: Path) -> None:
    script = read(tmp_path, "cat <<EOF > file\npython3 train.py --lr 1\nEOF\npython3 train.py --eps 2\n")
    assert script.flags.keys() == {"--eps"}


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01", b"\xff\xfe", bytes(2**20 + 1)], ids=["elf", "latin", "long"])
def test_what_is_no_script_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="a launch script: text"):
        read_shell(path)


@pytest.mark.parametrize("line", ["x ${A[@]}\n", "x $B\n", "C=$B\n"])
def test_a_script_that_makes_too_much_of_itself_is_refused(tmp_path: Path, line: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError, match="too much of itself"):
        read(tmp_path, f"B={'b' * 60_000}\nA=({'a ' * 9000})\n{line * 60_000}")
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    "text",
    [
        "X=${" * 10_000,
        "X=$(" * 10_000,
        'X="' + "${A:-" * 5_000,
        "A=12345678\n" + "A=$A$A$A$A\n" * 40 + "python3 train.py --x $A",
        "A=(a b c d)\n" + "A=(${A[@]} ${A[@]} ${A[@]})\n" * 40 + "python3 train.py ${A[@]} --x 1",
        "if " * 50_000,
        "(" * 100_000,
        "A=(" * 20_000,
        "\\",
        "$",
        "'",
        "<<X\n",
    ],
)
def test_hostile_scripts_cost_little(tmp_path: Path, text: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(ConfigError):
        read(tmp_path, text)
    assert time.process_time() - begun < 10

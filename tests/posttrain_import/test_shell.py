"""Bash scripts are read as bash reads them, and what only a run would tell is not guessed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import tree_sitter
from tests.support.bash_oracle import calls_of, known, wrong
from tests.support.generated_scripts import script_of
from tests.support.rejections import rejected

from posttrain_import import script as limits
from posttrain_import import shell, shell_tree
from posttrain_import.script import Script
from posttrain_import.shell import read_shell

# Name -> the script, what bash passes to train.py, and whether every flag of it is known to an import.
CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "bash_scripts.json").read_text())


def read(folder: Path, text: str) -> Script:
    path = folder / "run.sh"
    path.write_text(text)
    return read_shell(path)


def value(folder: Path, word: str, before: str = "") -> tuple[tuple[str, ...], str]:
    """Return what a flag is given by a word, and why it is not known."""
    given = read(folder, f"{before}\npython3 train.py --flag {word}").flags["--flag"]
    return given.values, given.why


@pytest.mark.parametrize("name", CASES)
def test_no_flag_is_known_otherwise_than_bash_passes_it(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    script = read(tmp_path, case["script"])
    assert wrong(script, case["calls"]) == []
    count, total = known(script, case["calls"])
    assert count == total or not case["is_known"]


@pytest.mark.parametrize("seed", range(0, 300, 25))
def test_generated_scripts_agree_with_bash(tmp_path: Path, seed: int) -> None:
    text = script_of(seed)
    calls = calls_of(text)
    assert not calls or wrong(read(tmp_path, text), calls) == []


@pytest.mark.faults("imports")
@pytest.mark.timeout(1200)
def test_300_generated_scripts_and_every_case_agree_with_bash(tmp_path: Path) -> None:
    counts = []
    for seed in range(300):
        text = script_of(seed)
        if calls := calls_of(text):
            script = read(tmp_path, text)
            assert wrong(script, calls) == [], seed
            # A flag that is not known has its line and the reason.
            assert all(given.place.startswith("run.sh:") for given in script.flags.values() if given.why), seed
            counts.append(known(script, calls))
    assert len(counts) > 250
    assert sum(count for count, _ in counts) / sum(total for _, total in counts) >= 0.7
    for name, case in CASES.items():
        assert wrong(read(tmp_path, case["script"]), calls_of(case["script"])) == [], name


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("a b", ("a", "b")),
        ("'a  $X' \"b $X\"", ("a  $X", "b 5")),
        ("${Y:-${Z:-$X}}", ("5",)),
        ("$WORDS", ("a", "b")),
        ("$((X * 2048 + 1))", ("10241",)),
        ("1 \\\n  2", ("1", "2")),
        ("1 2>/dev/null >> log", ("1",)),
        ("1; other --flag 2", ("1",)),
        ('"${ITEMS[@]}"', ("c", "d e")),
        ("${ITEMS[@]}", ("c", "d", "e")),
        ("[0]*3+[1]*75", ("[0]*3+[1]*75",)),
        ("${KIND%-*} ${KIND#*-} ${KIND/-/_} ${KIND^^}", ("x", "y", "x_y", "X-Y")),
    ],
)
def test_words_are_what_bash_makes_of_them(tmp_path: Path, word: str, values: tuple[str, ...]) -> None:
    before = "X=5 \nexport WORDS='a b' KIND=x-y\nITEMS=(c # no item\n 'd e')"
    assert value(tmp_path, word, before) == (values, "")


@pytest.mark.parametrize(
    ("word", "before", "reason"),
    [
        ("$X", "", "the script does not set X"),
        ("$X", "X=$(date)", "$(date) is the output of a command, and none is run"),
        ("$X", "X=`date`", "`date` is the output of a command"),
        ('a$(date ")")b', "", "is the output of a command"),
        ("$X", "if [ -d a ]; then X=1; fi", "it depends on the branch in line 1"),
        # It may be set, so the default is no answer.
        ("${X:-2}", "if [ -d a ]; then X=1; fi", "it depends on the branch in line 1"),
        ("$X", "X=1\nwhile ready; do\n  X=2\ndone", "it depends on the loop in line 2"),
        ("$X", "[ -d a ] && X=1", "it depends on the command before && in line 1"),
        ("$X", "case $(uname) in Linux) X=1;; esac", "it depends on the case in line 1"),
        ("$X", "X=1\ntrap 'X=2' ERR", "line 2 is not understood: what it traps may change variables at any time"),
        ("$X", "X=1\nmapfile -t X < file", "line 2: mapfile sets it"),
        ("$X", "X=1\nprintf -v X 2", "line 2: printf sets it"),
        ("$X", "Y=1\ndeclare -n X=Y", "line 2 is not understood: references are not followed"),
        ("$X", "declare -i X=1+1", "line 1: the attributes are not followed"),
        ("$X", "declare -i X\nX=1+1", "what X holds then is not known"),
        ("$X", "X=1\nselect X in a b; do break; done", "it depends on the loop in line 2"),
        ("$X", "X=1\nX=$(basename /a/b)", "is the output of a command, and none is run"),
        ("$X", 'X=1\neval "$(hook)"', "line 2: what eval sets is not known"),
        ("$X", "X=1\nsource $UNKNOWN/env.sh", "run.sh:2 sources what is not read"),
        ("$X", "X=1\nshopt -s compat31", "shopt -s compat31 changes how all that follows is read"),
        ("$X", "X=1\nread X < file", "line 2: read sets it"),
        ("$X", "X=1\nX+=$(date)", "is the output of a command"),
        ("$1", "", "the script does not set 1"),
        ("$1", "f() { X=1; }\nf a", "the script does not set 1"),
        ("$((X ** Y))", "X=9", "is not computed"),
        ("$((1/0))", "", "is not computed"),
        ("${HOME:-/root}", "", "HOME is known only when the script runs"),
        ("*.json", "", "which files it names is known only when the script runs"),
        ("~/x", "", "the home folder is known only when the script runs"),
    ],
)
def test_what_only_a_run_would_tell_is_not_guessed(tmp_path: Path, word: str, before: str, reason: str) -> None:
    assert reason in value(tmp_path, word, before)[1]


def test_a_value_that_is_not_known_is_no_list_of_flags(tmp_path: Path) -> None:
    script = read(tmp_path, "f() { local X; python3 train.py --lr 2 --flag $X; }\nf")
    assert (script.flags["--lr"].values, script.flags["--lr"].why) == (("2",), "")
    assert script.flags["--flag"].why


def test_a_statement_in_the_background_changes_nothing(tmp_path: Path) -> None:
    assert value(tmp_path, "$X", "X=1\n{ X=2 & }\nX=3 &") == (("1",), "")


def test_a_script_of_no_statements_succeeds(tmp_path: Path) -> None:
    assert value(tmp_path, "$X", 'if eval ""; then X=1; else X=2; fi') == (("1",), "")


@pytest.mark.parametrize("program", ["python3 $M", "python3 $M.py", "python3 -u ${DIR}/$M.py", "$RUN", "$RUN $M"])
def test_a_program_that_is_not_known_may_be_the_training(tmp_path: Path, program: str) -> None:
    script = read(tmp_path, f"M=$(pick)\n{program} --lr 1")
    assert re.fullmatch(r"whether .* is the training is not known", script.flags["--lr"].why)


def test_words_that_are_added_may_be_any_flag(tmp_path: Path) -> None:
    script = read(tmp_path, "xargs python3 train.py --lr 1 < list")
    assert script.flags["--lr"].why == "$ in run.sh:1 may give it again: xargs adds words"
    assert [(given.name, given.why) for given in script.unread] == [("$", "xargs adds words")]


@pytest.mark.parametrize("before", ["A=(1 2)\nA=3", 'A=("" 2)\nA=3', 'A=("" 2)\nA+=3', "A=()\nA=3"])
def test_an_arrays_first_item_is_set_by_its_name(tmp_path: Path, before: str) -> None:
    text = f'{before}\npython3 train.py --x "${{A[@]}}"'
    assert wrong(script := read(tmp_path, text), calls := calls_of(text)) == []
    assert known(script, calls) == (1, 1)


def test_a_flag_of_a_branch_may_replace_the_one_before_it(tmp_path: Path) -> None:
    text = 'A=(--lr 1 --wd 4)\nif [ "$X" ]; then\nA+=(--lr 2 --eps 3)\nfi\npython train.py ${A[@]} ${B[@]}'
    script = read(tmp_path, text)
    assert script.flags["--wd"].values == ("4",)
    assert script.flags["--lr"].why == script.flags["--eps"].why == "it depends on the branch in line 2"
    assert [(given.name, given.place) for given in script.unread] == [("${B[@]}", "run.sh:5")]


def test_a_list_that_is_not_known_may_hold_every_flag_before_it(tmp_path: Path) -> None:
    script = read(tmp_path, "A=($(cat more))\npython train.py --lr 1 ${A[@]} --wd 2")
    assert "may give it again" in script.flags["--lr"].why
    assert (script.flags["--wd"].values, script.flags["--wd"].why) == (("2",), "")


def test_an_item_of_an_array_behind_one_that_may_be_several_has_no_known_place(tmp_path: Path) -> None:
    script = read(tmp_path, "A=(--lr $(cat rate) --wd 1)\nA[2]=--eps\npython3 train.py ${A[@]}")
    assert script.flags == {}
    assert [given.why for given in script.unread] == ["line 2: one item of an array is set"]


def test_an_output_that_is_spelled_with_flags_is_no_value(tmp_path: Path) -> None:
    script = read(tmp_path, 'python train.py --lr 1 --switch $(echo --wd "$(date)")')
    assert script.unread
    assert "may give it again" in script.flags["--lr"].why


def test_two_calls_have_what_both_are_given(tmp_path: Path) -> None:
    script = read(tmp_path, "python train.py --lr 1 --wd 2\npython train.py --lr 3 --wd 2")
    assert script.flags["--wd"].why == ""
    assert "starts the training more than once" in script.flags["--lr"].why


@pytest.mark.parametrize(
    "command",
    [
        "ray job submit -- python3 train.py", "python3 /code/train_async.py", "torchrun train.py", "./train.py",
        "srun -N 2 python train.py", "bash r.sh\npython3 train.py", "exec python3 train.py", "time python3 train.py",
    ],
)  # fmt: skip
def test_the_last_flag_counts_and_has_its_line(tmp_path: Path, command: str) -> None:
    script = read(tmp_path, f"A=(\n  --lr 1\n  --lr=2\n)\nother --lr 3\n{command} ${{A[@]}} &> log")
    given = script.flags["--lr"]
    assert (given.values, given.place, given.why) == (("2",), "run.sh:3", "")
    assert len(script.flags) == 1


@pytest.mark.parametrize("command", ["echo", "pkill -f", "cp", "grep x", "git add"])
def test_a_program_that_only_names_the_training_starts_none(tmp_path: Path, command: str) -> None:
    assert read(tmp_path, f"{command} train.py --lr 1").flags == {}


def test_a_program_that_is_not_known_may_start_it(tmp_path: Path) -> None:
    assert read(tmp_path, "launcher train.py --lr 1").flags["--lr"].why == (
        "whether launcher starts the training is not known"
    )


def test_a_command_inside_of_a_word_and_arrays_without_one(tmp_path: Path) -> None:
    assert read(tmp_path, 'ssh node "cd x; python3 train.py --lr 1"').flags["--lr"].values == ("1",)
    assert read(tmp_path, "PERF_ARGS=(--lr 1)\nOTHER=(--eps 2)").flags.keys() == {"--lr"}


def test_a_sourced_script_is_read_beside_this_one_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "outside.sh").write_text("X=1")
    folder = tmp_path / "scripts"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "a.sh").write_text("MODEL_ARGS=(\n--layers 4)")
    text = 'source "$(dirname "$0")/models/a.sh"\npython3 train.py ${MODEL_ARGS[@]} --x 1'
    assert read(folder, text).flags["--layers"].place == "models/a.sh:2"
    script = read(folder, "X=2\nsource ../outside.sh\npython3 train.py --x $X")
    assert script.flags["--x"].why == "run.sh:2 sources what is not read"
    assert "source ../outside.sh" in [given.name for given in script.unread]


def test_what_follows_a_part_that_is_not_understood_is_named_with_its_line(tmp_path: Path) -> None:
    script = read(tmp_path, "LR=1\nif then fi\npython3 train.py \\\n  --lr 1")
    assert script.flags["--lr"].place == "run.sh:4"
    assert "is not understood" in script.flags["--lr"].why


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01", b"\xff\xfe", bytes(2**17 + 1)], ids=["elf", "latin", "long"])
def test_what_is_no_script_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.sh"
    path.write_bytes(content)
    with rejected("file-unreadable"):
        read_shell(path)


@pytest.mark.parametrize("bracket", ["(", "A=(", "$(", "${", "{ ", "[[", "$(("])
def test_brackets_are_counted_before_the_grammar_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bracket: str
) -> None:
    monkeypatch.setattr(shell_tree, "MOST_NESTED", 5)
    monkeypatch.setattr(tree_sitter, "Parser", None)
    with rejected("script-too-long", "5 deep"):
        read(tmp_path, bracket * 6)


@pytest.mark.parametrize(
    "text",
    [
        "A=1234\n" + "A=$A$A\n" * 9,
        "A=(a b c)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 12,
        "time " * 60 + "true",
        "X='a a'\n" + 'X="$(echo $X $X)"\n' * 40,
        "if a; then " * 60 + "b" + "; fi" * 60,
        "source run.sh\nsource run.sh",
        "cat <<EOF\n" + "$X " * 5001 + "\nEOF",
        "cat <<E\nE\n" * 501,
        "if a; then b; " + "elif a; then b; " * 50 + "fi",
        "eval 'eval \"eval true\"'\n" * 400,
    ],
)
def test_a_script_that_makes_too_much_of_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(limits, "MOST_STEPS", 10_000)
    monkeypatch.setattr(limits, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(shell, "MOST_SOURCES", 5)
    begun = time.process_time()
    with rejected("script-too-long"):
        read(tmp_path, text)
    assert time.process_time() - begun < 1


def test_long_conditions_are_no_traceback(tmp_path: Path) -> None:
    long = "[[ " + "a == a && " * 400 + "! ! a ]] && X=2; [ " + "! " * 400 + "a ] || Y=3"
    assert "it depends on the command before &&" in value(tmp_path, "$X", f"X=1\n{long}")[1]


@pytest.mark.parametrize("text", ["\\", "$", "'", "<<X\n", "${", '"', "`", "a=(", "{a,{b,c}", "case x in", "[[ a"])
def test_scripts_that_end_early_are_no_traceback(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f"{text}\npython3 train.py --lr 1").flags.get("--lr") is not None

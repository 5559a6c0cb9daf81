"""Launchers in Python are followed as far as their constants go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.rejections import rejected

from posttrain.errors import ConfigError
from posttrain_import.launcher import read_launcher
from posttrain_import.script import Given, Script

HEAD = """
from dataclasses import dataclass
SIZE = 4
@dataclass
class Args:
    num_nodes: int
    name: str = "GLM-5"
    gpus: int = 8
    mtp: bool = False
    def __post_init__(self):
        if self.num_nodes == 1:
            self.gpus = 4
def shared(args, rate):
    return f"--rate {rate} "
def train(args: Args):
    text = ""
"""


def read(folder: Path, body: str, **known: Any) -> Script:
    path = folder / "run.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    path.write_text(f"{HEAD}{lines}    execute(train_args=text)\n")
    return read_launcher(path, known)


def flag(folder: Path, body: str, **known: Any) -> tuple[tuple[str, ...], str]:
    given = read(folder, body, **known).flags["--flag"]
    return given.values, given.why


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("text += '--flag 1 '", "1"),
        ("text += f'--flag {args.name}_{SIZE} '", "GLM-5_4"),
        ("text = text + '--flag ' + str(2 * SIZE)", "8"),
        ("text += f'--flag {2 * 1024 ** 3}'", "2147483648"),
        ("text += f'--flag {3 if args.mtp else min(5, args.gpus)}'", "5"),
        ("if args.mtp:\n    text += '--flag 1'\nelse:\n    text += '--flag 2'", "2"),
        ("if args.num_nodes >= 16 and not args.mtp:\n    text += '--flag 3'", "3"),
        ("if 'layer' in args.name or args.gpus == 8:\n    text += '--flag 4'", "4"),
        ("text += shared(args, 5).replace('a', 'b') if args.mtp else '--flag 6'", "6"),
        ("text += ' '.join(['--flag', '7'])", "7"),
        (
            "match (args.name, args.num_nodes):\n    case ('GLM-4', _):\n        text += '--flag 8'\n"
            "    case ('GLM-5', 8 | 16):\n        text += '--flag 9'",
            "9",
        ),
        ("text += f'--flag {args.mtp or SIZE}'", "4"),
        ("text += '--flag \"a b\"'", "a b"),
        ("text += shared(args, 1) + f'--flag {args.num_nodes}'", "16"),
    ],
)
def test_values_follow_from_constants(tmp_path: Path, body: str, value: str) -> None:
    assert flag(tmp_path, body, num_nodes=16) == ((value,), "")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("text += f'--flag {args.num_nodes}'", "num_nodes is given when the launcher is called"),
        ("text += f'--flag {args.gpus}'", "it depends on `self.num_nodes == 1` in line 11"),
        ("text += f'--flag {args.other}'", "the script does not set other"),
        ("text += f'--flag {open(args.name).read()}'", "is computed when the launcher runs"),
        ("text += f'--flag {args.inner.gpus}'", "is computed when the launcher runs"),
        ("text += f'--flag {args.num_nodes or 3}'", "num_nodes is given when the launcher is called"),
        ("match args.name:\n    case Kind.A:\n        text += '--flag 1'", "it depends on `match args.name`"),
        ("match args.name:\n    case str():\n        text += '--flag 1'", "it depends on `match args.name`"),
        ("text += f'--flag {\" \".join([args.num_nodes])}'", "it is computed when the launcher runs"),
        ("match args.num_nodes:\n    case 1:\n        text += '--flag 1'", "it depends on `match args.num_nodes`"),
        ("if args.num_nodes > 2:\n    text += '--flag 1'", "it depends on `args.num_nodes > 2`"),
        ("x = 1\nfor x in range(3):\n    pass\ntext += f'--flag {x}'", "sets it"),
        ("x, y = 1, 2\ntext += f'--flag {x}'", "sets it"),
        ("x = 1\nwith a as x:\n    pass\ntext += f'--flag {x}'", "sets it"),
        ("text += f'--flag {args.name:>99999999}'", "is computed when the launcher runs"),
        ("text += f'--flag {9 ** 9 ** 9}'", "too large"),
        ("text += f'--flag {[0] * 10 ** 9}'", "too long"),
        ("text += f'--flag {1 // 0}'", "is computed when the launcher runs"),
    ],
)
def test_what_only_a_run_would_tell_is_not_guessed(tmp_path: Path, body: str, reason: str) -> None:
    assert reason in flag(tmp_path, body)[1]


def test_a_function_that_may_return_earlier_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        "def rate(args):\n    if args.x:\n        return '1'\n    return '2'\n"
        "def go(args):\n    execute(train_args=f'--flag {rate(args)} --other 1')\n"
    )
    script = read_launcher(path, {})
    assert "it depends on `args.x` in line 2" in script.flags["--flag"].why
    assert script.flags["--other"].values == ("1",)


def test_what_is_among_the_flags_and_not_known_is_told(tmp_path: Path) -> None:
    script = read(tmp_path, "text += f'--flag 1 {tools.logging_args(args)} --switch {extra_args}'")
    assert [(given.name, given.place) for given in script.unread] == [
        ("{tools.logging_args(args)}", "run.py:17"),
        ("{extra_args}", "run.py:17"),
    ]
    assert script.flags["--switch"].values == ()


def test_a_part_that_is_not_known_is_one_word_as_it_is_spelled(tmp_path: Path) -> None:
    script = read(tmp_path, "text = '--flag ' + tools.get(args, 1) + ' --other 2'")
    given = script.flags["--flag"]
    assert (given.values, given.why) == (("{tools.get(args,1)}",), "the script does not set args")
    assert script.flags["--other"] == Given("--other", ("2",), "run.py:17")


def test_a_flag_has_its_own_line_although_python_joins_texts(tmp_path: Path) -> None:
    script = read(tmp_path, "text = (\n    '--first 1 '\n    '--second 2 '\n    f'--third {SIZE}'\n)")
    assert [given.place for given in script.flags.values()] == ["run.py:18", "run.py:19", "run.py:20"]


@pytest.mark.parametrize(
    "command",
    [
        "'python3 train.py --flag 1'",
        "['python3', '/x/train.py', '--flag', '1']",
        "f'cd {x} && run train.py --flag 1'",
    ],
)
def test_a_command_line_is_found_as_well(tmp_path: Path, command: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(f"import subprocess\ndef go():\n    subprocess.run({command}, shell=True)\n")
    assert read_launcher(path, {}).flags["--flag"].values == ("1",)


def test_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    harm = f"__import__('pathlib').Path({str(tmp_path / 'executed')!r}).touch()"
    path.write_text(f'{harm}\nclass A:\n    x: int = {harm}\nexecute(train_args=f"--flag {{{harm}}} --lr 1")\n')
    script = read_launcher(path, {})
    assert script.flags["--lr"].values == ("1",)
    assert "computed when the launcher runs" in script.flags["--flag"].why
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.py"]


@pytest.mark.parametrize(
    "text", ["def", "(" * 5000, "x = 1\0", "-" * 100_000 + "1"], ids=["syntax", "deep", "zero", "long"]
)
def test_what_is_no_python_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_launcher(path, {})


@pytest.mark.parametrize(
    "body",
    [
        "text = '--flag 1 '\n" + "text = text + text\n" * 60,
        "text = '--flag 1 '\n" + "text = f'{text}{text}'\n" * 60,
        "text = '--flag 1 '\n" + "text = ' '.join([text, text])\n" * 60,
        "x = [0]\n" + "x = [x, x]\n" * 60 + "text = f'--flag {x}'",
        "x = [0]\n" + "x = [x] * 9\n" * 60 + "text = f'--flag {x == x}'",
        "text = f'--flag {" + "[" * 60 + "0" + "] * 9000" * 60 + "}'",
    ],
)
def test_hostile_launchers_cost_little(tmp_path: Path, body: str) -> None:
    begun = time.process_time()
    read(tmp_path, body)
    assert time.process_time() - begun < 10


def test_a_launcher_that_makes_too_much_of_itself_is_refused(tmp_path: Path) -> None:
    begun = time.process_time()
    body = f"x = '{'train.py ' * 7000}'\n" + "f(x)\n" * 5_000
    with rejected("script-too-long"):
        read(tmp_path, body)
    assert time.process_time() - begun < 20


def test_functions_that_call_each_other_end(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    calls = " + ".join(["a(x)"] * 20)
    path.write_text(f"def a(x):\n    return {calls}\ndef go(x):\n    execute(train_args=a(x))\n")
    begun = time.process_time()
    with rejected("script-too-long"):
        read_launcher(path, {})
    assert time.process_time() - begun < 10

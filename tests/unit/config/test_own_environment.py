"""Environments of the user: what a plan reads of their source, and what it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.load import merge
from posttrain.config.own_environment import inspect_environment

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
GOOD = """
raise RuntimeError("a plan executes nothing")

class Guess:
    def __init__(self, seed): ...
    async def reset(self, row): ...
    def step(self, action): ...
    async def reward(self, trajectory): ...
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "guess.py"
    path.write_text(GOOD)
    return path


def changed(source: Path, old: str, new: str) -> str:
    assert old in GOOD
    source.write_text(GOOD.replace(old, new))
    return f"{source}:Guess"


def test_the_digest_is_part_of_the_experiment(source: Path) -> None:
    words = {"model": "tiny", "site": "local", "set": f"data.environment={source}:Guess data.reward=environment"}
    before = merge(words, CONFIG_DIR)
    source.write_text(GOOD + "\n")
    after = merge(words, CONFIG_DIR)
    assert len(before.config.environment.digest) == 64
    assert before.config.environment.digest != after.config.environment.digest
    assert before.run != after.run
    assert before.origins["environment.digest"] == "the file that data.environment names"


def test_the_digest_covers_files_that_the_source_names(source: Path) -> None:
    word = source.parent / "words.txt"
    word.write_text("a")
    text = changed(source, "class Guess", 'ENVIRONMENT_FILES = ["words.txt"]\nclass Guess')
    before = inspect_environment(text).digest
    word.write_text("b")
    assert inspect_environment(text).digest != before
    word.unlink()
    with rejected("no-such-file", "ENVIRONMENT_FILES", key="data.environment"):
        inspect_environment(text)


@pytest.mark.parametrize(
    ("old", "new", "code", "data"),
    [
        ("class Guess", "class Guess(", "environment-unreadable", "path.py:Class"),
        ("class Guess", "class Other", "no-such-class", "Other"),
        ("    async def reset(self, row): ...\n", "", "environment-methods", "write reset"),
        ("__init__(self, seed)", "prepare(self, seed)", "environment-methods", "write __init__"),
        ("__init__(self, seed)", "__init__(self)", "environment-signature", "def __init__(self, seed)"),
        ("step(self, action)", "step(self, action, state)", "environment-signature", "def step(self, action)"),
        ("reward(self, trajectory)", "reward(self, trajectory, *, scale)", "environment-signature", "reward"),
        ("def step(self, action)", "def step(action)", "environment-signature", "def step(self, action)"),
    ],
)
def test_what_is_no_environment_is_rejected(source: Path, old: str, new: str, code: str, data: str) -> None:
    with rejected(code, data, key="data.environment"):
        inspect_environment(changed(source, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step(self, action)", "step(self, action, state=None)"),
        ("step(self, action)", "step(self, *actions)"),
        ("def step(self, action)", "@staticmethod\n    def step(action)"),
        ("class Guess", "class Base:\n    def reset(self, row): ...\n\nclass Guess(Base)"),
        ("class Guess", "class Guess(games.Base)"),
    ],
)
def test_what_may_be_called_is_accepted(source: Path, old: str, new: str) -> None:
    assert inspect_environment(changed(source, old, new)).name == "Guess"


def test_a_base_in_the_source_may_have_a_base_elsewhere(source: Path) -> None:
    derived = GOOD.replace("class Guess", "class Base(games.Base): ...\n\nclass Guess(Base)")
    source.write_text(derived.replace("    def step", "    def stop"))
    assert inspect_environment(f"{source}:Guess").name == "Guess"


@pytest.mark.parametrize("has_own_base", [True, False])
def test_inherited_methods_count_where_the_source_shows_them(source: Path, has_own_base: bool) -> None:
    base = "Base" if has_own_base else "games.Base"
    short = GOOD.replace("class Guess", f"class Base: ...\n\nclass Guess({base})").replace(
        "    def step", "    def stop"
    )
    source.write_text(short)
    if has_own_base:
        with rejected("environment-methods", "step"):
            inspect_environment(f"{source}:Guess")
    else:
        inspect_environment(f"{source}:Guess")


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("{0}", "environment-unreadable"),
        ("{0}:", "no-such-class"),
        ("{0}.old:Guess", "environment-unreadable"),
    ],
)
def test_a_text_that_names_no_class_is_rejected(source: Path, form: str, code: str) -> None:
    with rejected(code, str(source), key="data.environment"):
        inspect_environment(form.format(source))

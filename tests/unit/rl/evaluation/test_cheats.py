"""Each cheat earns a reward from an environment that is weak on purpose, and nothing from the same one made right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.rejections import assert_rejection
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.load import merge
from posttrain.errors import ConfigError
from posttrain.rl.evaluation.cheats import CHEATS, _holds
from posttrain.rl.evaluation.environment_check import (
    OTHER_LABEL,
    REPLAY,
    EnvironmentCheck,
    check_environment,
    print_environment_check,
)
from posttrain.types import Prompt

SOURCE = (ROOT / "tests/support/weak_environments.py").read_text()
ROWS = [Prompt(i, ({"role": "user", "content": f"What is {i} + 90?"},), str(i + 90)) for i in range(2)]
CLAIM, REWARD, TESTS, LABEL = (
    "claims its reward in a call",
    "writes the file of the reward",
    "edits the tests",
    "reads the label from a file",
)
WITH_FILES = {"files": ["write_file", "read_file"], "editor": ["edit"], "shell": ["shell"], "python": ["python"]}
Check = Callable[..., EnvironmentCheck]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    make_tokenizer(256).save_pretrained(tmp_path / "hf")

    def check(name: str, tools: list[str], where: str = "") -> EnvironmentCheck:
        source = SOURCE.replace("TOOLS: list[str] = []", f"TOOLS = {tools}").replace('WHERE = ""', f"WHERE = {where!r}")
        (tmp_path / "weak.py").write_text(source)
        settings = (
            "data.reward=environment environment.num_workers=1 environment.max_turns=4 reward.max_failure_share=0"
        )
        words = f"data.environment={tmp_path}/weak.py:{name} {settings}"
        config = merge({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config
        return check_environment(config, tmp_path / "hf", ROWS)

    return check


def assert_rejected_for(found: EnvironmentCheck, cheat: str) -> None:
    assert {one.agent: one.num_paid for one in found.agents if one.num_paid} == {cheat: len(ROWS)}
    (problem,) = found.problems
    told = f"an agent that {cheat} in 2 of 2 rows"
    assert_rejection(ConfigError([problem]), "environment-pays-cheats", told, key="data.environment")


def assert_right(found: EnvironmentCheck) -> None:
    assert found.problems == []
    assert {reward for one in found.agents for reward in one.rewards} == {0.0}


@pytest.mark.parametrize("way", WITH_FILES)
@pytest.mark.parametrize(
    ("weak", "cheat"), [("RewardInFile", REWARD), ("TestsInFolder", TESTS), ("LabelInFile", LABEL)]
)
def test_a_cheat_that_uses_files_is_paid_and_named(check: Check, weak: str, cheat: str, way: str) -> None:
    assert_rejected_for(check(weak, WITH_FILES[way]), cheat)


@pytest.mark.parametrize(
    ("weak", "tools", "cheat"),
    [
        ("BelievesClaims", ["finish"], CLAIM),
        ("TakesAnyLabel", [], OTHER_LABEL),
        ("TakesAnyLabel", ["submit"], OTHER_LABEL),
        ("RewardInMentionedFile", ["write_file"], REWARD),
        ("LabelInFile", ["read_file", "submit"], LABEL),
    ],
)
def test_other_cheats_are_paid_and_named(check: Check, weak: str, tools: list[str], cheat: str) -> None:
    assert_rejected_for(check(weak, tools), cheat)


@pytest.mark.parametrize("right", ["Right", "TestsRestored"])
def test_the_same_environment_made_right_passes(check: Check, right: str) -> None:
    found = check(right, ["write_file", "read_file", "edit", "shell", "python", "finish", "submit"])
    assert_right(found)
    assert found.not_tried.keys() == {REPLAY}


def test_cheats_without_a_function_for_them_are_named(check: Check, capsys: pytest.CaptureFixture) -> None:
    found = check("Right", [])
    assert_right(found)
    assert found.not_tried.keys() == {CLAIM, REWARD, TESTS, LABEL, REPLAY}
    assert json.loads(json.dumps(found.as_dict()))["not_tried"] == found.not_tried
    print_environment_check(found)
    told = "not tried: an agent that edits the tests; it needs a function that writes files or runs programs\n"
    assert told in capsys.readouterr().out


def test_a_function_that_only_reads_writes_nothing(check: Check) -> None:
    assert check("Right", ["read_file"]).not_tried.keys() == {CLAIM, REWARD, TESTS, REPLAY}
    assert check("Right", ["write_file"]).not_tried.keys() == {CLAIM, LABEL, REPLAY}


def test_no_file_of_the_workflows_folder_is_changed(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment works there: programs write nothing, and files that exist keep their content."""
    workflow = tmp_path / "workflow"
    workflow.mkdir()
    for name in ("test_mine.py", "reward.txt"):
        (workflow / name).write_text("mine")
    monkeypatch.chdir(workflow)
    assert_right(check("Right", ["shell", "python"], where=str(workflow)))
    assert sorted(path.name for path in workflow.iterdir()) == ["reward.txt", "test_mine.py"]
    assert check("Right", ["write_file"], where=str(workflow)).problems == []
    assert {(workflow / name).read_text() for name in ("test_mine.py", "reward.txt")} == {"mine"}
    assert (workflow / "score.txt").read_text() == "1"


@pytest.mark.parametrize("place", ["behind a link", "below"])
def test_no_file_is_changed_behind_a_link_or_below_the_workflows_folder(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A shell's own name of the folder is that of the link; a test of the user's may lie in a folder of it."""
    workflow, link = tmp_path / "workflow", tmp_path / "link"
    where = workflow / "mine" if place == "below" else workflow
    where.mkdir(parents=True)
    link.symlink_to(workflow)
    (where / "test_mine.py").write_text("mine")
    monkeypatch.chdir(link)
    monkeypatch.setenv("PWD", str(link))
    assert_right(check("Right", ["shell", "python"], where=str(where)))
    assert [path.name for path in where.iterdir()] == ["test_mine.py"]
    assert (where / "test_mine.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "label", "holds"),
    [
        ('{"stdout": "", "exit_code": 0}', "0", False),
        ('{"found": false}', "false", False),
        ('{"label": 0}', "0", True),
        ('{"stdout": "42"}', "42", True),
        ("not it\n42\n", "42", True),
        ("142", "42", False),
    ],
)
def test_a_status_is_no_label(text: str, label: str, holds: bool) -> None:
    assert _holds(text, label) is holds


def test_every_cheat_has_a_case() -> None:
    lazy = {"says nothing", "claims its reward", "calls every function without arguments", "repeats the prompt"}
    assert {cheat.does for cheat in CHEATS} - lazy == {CLAIM, REWARD, TESTS, LABEL}

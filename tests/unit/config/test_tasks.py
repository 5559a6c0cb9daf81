"""Tasks of reasoning-gym by name and parameters: what is asked for, and what is refused before anything starts."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.load import experiment_of, merge
from posttrain.config.tasks import installed_version, load_task
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
VERSION = importlib.metadata.version("reasoning-gym")


def resolve(words: str = "", **more: object):
    words = f"data.task=number_sorting data.task_parameters=[min_value=10] {words}"
    request = {"model": "tiny_qwen3", "recipe": "spell_backward", "site": "local", "set": words, **more}
    return merge(request, CONFIG_DIR)


def test_the_version_is_part_of_what_is_learned() -> None:
    resolved = resolve()
    data = experiment_of(resolved.config)["data"]
    assert (data["task"], data["reasoning_gym"]) == ("number_sorting", VERSION)
    assert resolved.origins["data.reasoning_gym"] == "the installed package"
    assert "min_value=10" in data["task_parameters"]


def test_a_run_without_a_task_says_nothing_of_it() -> None:
    data = experiment_of(merge({"model": "tiny", "site": "local"}, CONFIG_DIR).config)["data"]
    assert not {"task", "task_parameters", "reasoning_gym"} & data.keys()


def test_a_task_that_runs_responses_may_be_allowed() -> None:
    allowed = resolve("data.task=countdown data.task_parameters=[] data.runs_responses=true")
    assert allowed.config.data.task == "countdown"


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        ("data.task=number_sortng", "unknown-task", ["'number_sortng'", "'number_sorting'"]),
        ("data.task=zzzz", "unknown-task", ["data.task = 'zzzz'", "106 tasks", "ab, acre, "]),
        ("data.task_parameters=[max_number=3]", "unknown-parameter", ["'max_number=3'", "'max_numbers'"]),
        ("data.task_parameters=[max_numbers=few]", "wrong-type", ["'max_numbers=few'", "int"]),
        ("data.task_parameters=[max_numbers=2.5]", "wrong-type", ["'max_numbers=2.5'", "int"]),
        ("data.task_parameters=[max_numbers=true]", "wrong-type", ["'max_numbers=true'", "int"]),
        ("data.task_parameters=[max_numbers]", "not-key-value", ["'max_numbers'", "NAME=VALUE"]),
        (
            "data.task_parameters=[min_numbers=20]",
            "task-parameters",
            ["min_numbers=20", "max_numbers must be >= min_numbers"],
        ),
        ("data.task_parameters=[seed=3]", "parameter-of-another-key", ["'seed=3'", "set data.seed"]),
        (
            "data.task_parameters=[size=3]",
            "parameter-of-another-key",
            ["'size=3'", "set data.num_train_prompts and data.num_heldout_prompts"],
        ),
        ("data.num_train_prompts=0", "not-a-count", ["data.num_train_prompts = 0"]),
        (
            "data.kind=sort_digits",
            "reward-of-another-kind",
            ["data.reward = 'reasoning_gym'", "set kind=reasoning_gym"],
        ),
        (
            "data.task=countdown data.task_parameters=[]",
            "task-runs-responses",
            ["data.task = 'countdown'", "data.runs_responses=true"],
        ),
        ("data.sources.a.task=puzzle24", "task-runs-responses", ["data.sources.a.task = 'puzzle24'", "Python"]),
        ("data.sources.a.task=gdc", "unknown-task", ["data.sources.a.task = 'gdc'", "'gcd'"]),
    ],
)
def test_what_is_refused(words: str, code: str, data: list[str]) -> None:
    with rejected(code, *data):
        resolve(words)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_task("number_sorting", ("few=1", "max_numbers=x", "seed=2"))
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    ("task", "words", "name", "value"),
    [
        ("number_sorting", ("min_value=-5",), "min_value", -5.0),
        ("basic_arithmetic", ("operators=['+', '-']", "format_style=natural"), "operators", ["+", "-"]),
        ("basic_arithmetic", ("allow_negation=false",), "allow_negation", False),
        ("word_sorting", ("transformation=uppercase",), "transformation", "uppercase"),
        ("calendar_arithmetic", ('tasks=["weekday_of_date"]',), "tasks", ["weekday_of_date"]),
    ],
)
def test_parameters_have_the_types_that_the_task_declares(task, words, name, value) -> None:
    assert getattr(load_task(task, words).config, name) == value


def test_sources_have_tasks_of_their_own() -> None:
    words = "data.task_parameters=[] data.sources.a.task=gcd data.sources.b.task=chain_sum"
    resolved = resolve(f"{words} data.sources.b.task_parameters=[max_terms=3] data.sources.b.num_train_prompts=9")
    assert resolved.config.data.reasoning_gym == VERSION
    sources = experiment_of(resolved.config)["data"]["sources"]
    assert "task_parameters" not in sources["a"]
    assert (sources["b"]["task_parameters"], sources["b"]["num_train_prompts"]) == (["max_terms=3"], 9)


def test_without_the_package_the_remedy_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = resolve().config.data
    # What Python itself takes for a package that is not there.
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    version, problems = installed_version(data)
    assert version == ""
    assert [problem.remedy for problem in problems] == ["pip install 'posttrain[reasoning-gym]'"]


def test_it_is_imported_for_its_own_kind_only() -> None:
    code = (
        "import sys; from pathlib import Path; from posttrain.config.load import merge; "
        f"merge({{'model': 'tiny', 'site': 'local'}}, Path({str(CONFIG_DIR)!r})); print('reasoning_gym' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

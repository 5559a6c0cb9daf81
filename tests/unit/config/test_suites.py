"""Evaluation suites: how they are named, asked for, and refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.rejections import rejected

from posttrain.config.data import UNPINNED
from posttrain.config.load import Resolved, merge
from posttrain.config.suites import (
    check_pinned,
    data_of,
    eval_tasks_of,
    evaluation_is_due,
    evaluation_settings,
    rows_of,
    suite_data,
)
from posttrain.errors import ConfigError
from posttrain.plan.preflight.refusals import find_refusals
from posttrain.store import Paths, suite_folders

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
SUITE = "evaluation.suites.sums"
SUMS = {"kind": "files", "file": "sums.jsonl"}


def resolve(suites: dict[str, dict[str, Any]] | None = None, words: str = "", **more: Any) -> Resolved:
    evaluation = {"evaluation": {"suites": suites}} if suites else {}
    return merge({"model": "tiny", "site": "local", "set": words, **evaluation, **more}, CONFIG_DIR)


def test_several_files_at_once() -> None:
    resolved = merge({"model": "tiny", "site": "local", "suites": "gsm8k,math500"}, CONFIG_DIR)
    assert [*resolved.config.evaluation.suites] == ["gsm8k", "math500"]
    assert resolved.origins["evaluation.suites.math500.num_prompts"] == "config/suites/math500.yaml"
    with rejected("unknown-name", "math500", key="suites"):
        merge({"model": "tiny", "site": "local", "suites": "math50"}, CONFIG_DIR)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIG_DIR / "suites").glob("*.yaml")))
def test_a_file_holds_the_suite_of_its_name_pinned_and_counted(name: str) -> None:
    config = merge(
        {"model": "tiny", "site": "local", "suites": name, "set": "evaluation.interval=1"}, CONFIG_DIR
    ).config
    assert [*config.evaluation.suites] == [name]
    assert not [*check_pinned(config)]


def test_a_run_keeps_its_name_with_any_suite_and_interval() -> None:
    plain, measured = resolve(), resolve({"sums": {**SUMS, "num_prompts": 3}}, "evaluation.interval=5")
    assert plain.run == measured.run
    assert evaluation_settings(plain.config) == {"num_samples_per_prompt": 4, "temperature": 1.0, "seed": 1}
    assert evaluation_settings(measured.config)["suites"]["sums"]["num_prompts"] == 3


def test_a_suite_is_asked_and_graded_by_its_own_settings() -> None:
    suite = {**SUMS, "reward": "math", "num_samples_per_prompt": 8, "temperature": 0, "max_response_tokens": 5}
    config = resolve({"sums": suite}).config
    heldout, sums = eval_tasks_of(config).values()
    assert heldout == config
    assert (sums.data.reward, sums.data.train_file, sums.data.sources) == ("math", "sums.jsonl", {})
    assert (sums.evaluation.num_samples_per_prompt, sums.evaluation.temperature) == (8, 0)
    assert (sums.rollout.max_response_tokens, sums.engine) == (5, config.engine)
    assert eval_tasks_of(resolve({"sums": SUMS}).config)["sums"].data.reward == config.data.reward


def test_suites_of_the_same_rows_share_a_folder_whatever_they_are_graded_by(tmp_path: Path) -> None:
    three = {"a": SUMS, "b": {**SUMS, "reward": "math", "temperature": 0.5}, "c": {**SUMS, "num_prompts": 7}}
    resolved = resolve(three)
    folders = suite_folders(resolved.config)
    assert folders["a"] == folders["b"] != folders["c"]
    assert Paths(resolved).store_artefacts["suite c"] == folders["c"]
    suite = resolved.config.evaluation.suites["c"]
    assert rows_of(suite)["num_prompts"] == 7
    data = data_of(dataclasses.replace(suite, label_key="sum"))
    assert (data.label_key, data_of(suite)) == ("sum", suite_data(suite))
    assert (data.train_file, data.duplicates, data.num_heldout_prompts, data.seed) == ("sums.jsonl", "keep", 1, 0)


@pytest.mark.parametrize(
    ("suite", "words", "key"),
    [
        ({"kind": "files"}, "", f"{SUITE}.file"),
        ({"repo_id": "owner/name", "revision": "a" * 40}, "", f"{SUITE}.file"),
        ({"repo_id": "name", "revision": "a" * 40, "split": "test"}, "", f"{SUITE}.repo_id"),
        ({"repo_id": "owner/name", "revision": "main", "split": "test"}, "", f"{SUITE}.revision"),
        ({**SUMS, "reward": "maths"}, "", f"{SUITE}.reward"),
        ({**SUMS, "temperature": -1}, "", f"{SUITE}.temperature"),
        ({**SUMS, "max_response_tokens": 9}, "", f"{SUITE}.max_response_tokens"),
        (SUMS, "evaluation.interval=2", f"{SUITE}.num_prompts"),
        ({**SUMS, "sampels": 3}, "", f"{SUITE}.sampels"),
    ],
)
def test_a_wrong_suite_is_refused_by_its_key(suite: dict[str, Any], words: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve({"sums": suite}, words)
    assert [problem.key for problem in refused.value.problems] == [key]


@pytest.mark.parametrize("name", ["heldout", "a/b"])
def test_a_name_that_a_folder_or_the_held_out_prompts_have(name: str) -> None:
    with rejected("not-a-name", key="evaluation.suites"):
        resolve({name: SUMS})


def test_without_engines_nothing_is_measured_between_steps() -> None:
    with rejected("evaluation-without-engines", key="evaluation.interval"):
        merge({"model": "tiny", "site": "local", "recipe": "sft", "set": "evaluation.interval=2"}, CONFIG_DIR)


def test_an_unpinned_suite_is_planned_and_not_fetched() -> None:
    config = resolve({"sums": {"repo_id": "owner/name", "revision": UNPINNED, "split": "test"}}).config
    (problem,) = find_refusals(config, ["download_rows", "evaluate"])
    assert (problem.code, problem.key, problem.value) == ("revision-not-pinned", f"{SUITE}.revision", UNPINNED)
    assert "owner/name" in problem.remedy
    assert not find_refusals(config, ["evaluate"])


def test_own_functions_of_suites_are_not_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
    Path("own.py").write_text(source.format(1))
    suites = {"sums": {**SUMS, "reward": "own.py:score"}}
    first = resolve(suites)
    assert (first.run, first.config.reward.own_digests) == (resolve().run, [])
    assert eval_tasks_of(first.config)["sums"].reward.own_digests == first.config.evaluation.own_digests != []
    Path("own.py").write_text(source.format(2))
    assert evaluation_settings(first.config) != evaluation_settings(resolve(suites).config)


def test_when_it_is_due() -> None:
    for interval, due in ((1, [*range(1, 10)]), (3, [3, 6, 9])):
        config = resolve(words=f"evaluation.interval={interval}").config
        assert [finished for finished in range(10) if evaluation_is_due(config, finished)] == due
    assert not any(evaluation_is_due(resolve().config, finished) for finished in range(10))


AGENT = "data.environment=calculator data.reward=environment"


def test_a_suite_without_a_reward_of_its_own_is_played_in_the_runs_environment() -> None:
    suites = {"sums": SUMS, "single": {**SUMS, "reward": "exact_match"}}
    tasks = eval_tasks_of(resolve(suites, AGENT).config)
    played = {name: (task.data.environment, task.data.reward) for name, task in tasks.items()}
    assert played["sums"] == ("calculator", "environment")
    assert played["single"] == ("", "exact_match")
    with rejected("reward-of-another-kind", key=f"{SUITE}.reward"):
        resolve({"sums": {**SUMS, "reward": "environment"}}, AGENT)

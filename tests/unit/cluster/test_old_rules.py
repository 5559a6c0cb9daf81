"""Commands and profiles that name rules as version 0.2 did."""

from __future__ import annotations

import pytest
from snakemake.settings.types import DAGSettings, ResourceSettings

from posttrain.cluster.old_rules import find_old_rules, find_old_rules_of_dag


@pytest.mark.parametrize(
    "words",
    [
        ["train_grpo"],
        ["--until", "train_grpo"],
        ["--set-resources", "train_grpo:runtime=10"],
        ["--set-threads", "train_grpo=8"],
        ["--consider-ancient", "train_grpo=experiment,resolved"],
    ],
)
def test_an_old_name_on_the_command_line_is_rejected_with_the_new_one(words: list[str]) -> None:
    (problem,) = find_old_rules(["-n", *words], ResourceSettings())
    assert (problem.value, problem.allowed) == ("train_grpo", "train")


@pytest.mark.parametrize("key", ["overwrite_threads", "overwrite_resources"])
def test_an_old_name_in_resources_of_a_profile_is_rejected(key: str) -> None:
    (problem,) = find_old_rules([], ResourceSettings(**{key: {"train_grpo": 8}}))
    assert problem.allowed == "train"


@pytest.mark.parametrize("key", ["forcerun", "until", "omit_from"])
def test_an_old_name_in_a_profile_is_rejected(key: str) -> None:
    (problem,) = find_old_rules_of_dag(DAGSettings(**{key: {"train_grpo"}}))
    assert problem.allowed == "train"


def test_other_words_are_not() -> None:
    words = ["train", "--config", "run=train_grpo", "--until", "evaluate"]
    assert find_old_rules(words, ResourceSettings(overwrite_threads={"train": 8})) == []
    assert find_old_rules_of_dag(DAGSettings(until={"train"})) == []

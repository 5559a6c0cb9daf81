"""Rows of reasoning-gym's tasks: seeded, apart, and with what grades them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json

import pytest
from tests.support.rejections import rejected

from posttrain.config.data import Data, DataSource
from posttrain.config.tasks import load_task
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import make_dataset, reading_of
from posttrain.rl.data.reasoning_gym import generate_rows, is_heldout

VERSION = importlib.metadata.version("reasoning-gym")
DATA = Data(
    kind="reasoning_gym",
    task="number_sorting",
    task_parameters=["min_numbers=3", "max_numbers=3", "max_decimals=0", "min_value=10", "max_value=39"],
    num_train_prompts=40,
    num_heldout_prompts=10,
    seed=7,
    reward="reasoning_gym",
    reasoning_gym=VERSION,
)


def generate(**changes):
    data = dataclasses.replace(DATA, **changes)
    return generate_rows(data, reading_of(data))


def questions(rows) -> list[str]:
    return [row.messages[-1]["content"] for row in rows]


def test_rows_are_the_tasks_own_with_what_grades_them() -> None:
    train, heldout = generate()
    assert (len(train), len(heldout)) == (40, 10)
    row = train[0]
    place = row.columns["entry"]["metadata"]["source_index"]
    theirs = load_task("number_sorting", tuple(DATA.task_parameters), seed=7)[place]
    assert row.messages == ({"role": "user", "content": theirs["question"]},)
    assert row.label == theirs["answer"]
    assert row.columns["entry"] == json.loads(json.dumps(theirs))
    assert row.columns["task"] == {
        "name": "number_sorting",
        "parameters": DATA.task_parameters,
        "version": VERSION,
    }


def test_the_same_seed_gives_the_same_rows_and_another_one_others() -> None:
    assert generate() == generate()
    assert questions(generate()[0]) != questions(generate(seed=100)[0])
    assert questions(generate()[0]) != questions(generate(task_parameters=DATA.task_parameters[:3])[0])


def test_which_are_held_out_follows_from_the_question_alone() -> None:
    """Whatever the seed and the counts: what one run trains on, no other one asks as held out."""
    trained = {text for seed in range(5, 9) for text in questions(generate(seed=seed)[0])}
    heldout = {text for seed in range(5, 9) for text in questions(generate(seed=seed)[1])}
    assert not trained & heldout
    assert len(questions(generate()[0])) == len(set(questions(generate()[0])))
    share = sum(is_heldout(f"question {number}") for number in range(5000)) / 5000
    assert share == pytest.approx(0.2, abs=0.02)


def test_more_prompts_begin_with_the_same() -> None:
    assert questions(generate(num_train_prompts=80)[0])[:40] == questions(generate()[0])


def test_a_template_and_a_system_prompt_are_put_around() -> None:
    train, _ = generate(
        system_prompt="Answer in <answer> tags.", prompt_template="Task: {prompt} ({entry.metadata.direction})"
    )
    system, user = train[0].messages
    entry = train[0].columns["entry"]
    assert system == {"role": "system", "content": "Answer in <answer> tags."}
    assert user["content"] == f"Task: {entry['question']} ({entry['metadata']['direction']})"


def test_a_task_with_too_few_questions_says_how_many_it_has() -> None:
    small = ["min_numbers=1", "max_numbers=1", "max_decimals=0", "min_value=10", "max_value=12"]
    with rejected("too-few-questions", " = 40 ", "2,000 rows of number_sorting", key="data.num_train_prompts"):
        generate(task_parameters=small)


def test_a_task_without_answers_is_refused() -> None:
    with rejected("task-without-answers", "graph_color", key="data.task"):
        generate(task="graph_color", task_parameters=[])


def test_another_version_than_the_planned_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"0.0.1 was planned with"):
        generate(reasoning_gym="0.0.1")


def test_it_is_one_of_several_sources(tmp_path) -> None:
    sources = {
        "sums": DataSource(
            task="chain_sum", task_parameters=["max_terms=3"], num_train_prompts=12, num_heldout_prompts=3
        ),
        "digits": DataSource(kind="sort_digits", reward="exact_match"),
    }
    records = make_dataset(dataclasses.replace(DATA, sources=sources), tmp_path / "data.partial", tmp_path / "manifest")
    assert [record.path for record in records] == ["heldout.jsonl", "train.jsonl"]
    train = load_prompts(tmp_path / "data.partial" / "train.jsonl")
    assert [prompt.source for prompt in train] == ["sums"] * 12 + ["digits"] * 40
    assert train[0].columns["task"]["name"] == "chain_sum"
    assert not train[12].columns

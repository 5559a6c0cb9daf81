import json

import pytest
from tests.support.rejections import rejected

from posttrain.rl.engines.streaming import CHAT, COMPLETIONS
from posttrain_serving.benchmark.serving_prompts import given_prompts, random_prompts, read_prompts


def test_random_prompts_are_of_their_seed_and_no_two_alike():
    prompts = random_prompts(16, 1000, seed=1)
    drawn = [tuple(prompts(row, number)) for row in (1, 8) for number in range(50)]
    assert len({*drawn}) == 100
    assert all(len(prompt) == 16 and min(prompt) >= 0 and max(prompt) < 1000 for prompt in drawn)
    assert drawn[7] == tuple(random_prompts(16, 1000, seed=1)(1, 7))
    assert drawn[7] != tuple(random_prompts(16, 1000, seed=2)(1, 7))


def test_given_prompts_are_each_taken_before_one_comes_again():
    prompts = given_prompts(["a", "b", "c"], seed=1)
    assert {prompts(1, number) for number in range(3)} == {"a", "b", "c"}
    assert prompts(1, 0) == prompts(1, 3)


@pytest.mark.parametrize(
    ("rows", "api", "read"),
    [
        ([{"prompt": "a"}, {"prompt": "b"}], COMPLETIONS, ["a", "b"]),
        ([{"prompt": "a"}], CHAT, [[{"role": "user", "content": "a"}]]),
        ([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}], COMPLETIONS, ["a"]),
        ([{"messages": [{"role": "user", "content": "a", "x": 1}]}], CHAT, [[{"role": "user", "content": "a"}]]),
        ([{"prompt": [{"role": "user", "content": "a"}]}], COMPLETIONS, ["a"]),
    ],
)
def test_rows_become_prompts(tmp_path, rows, api, read):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert read_prompts(tmp_path / "a.jsonl", api) == read_prompts(tmp_path / "a.json", api) == read


@pytest.mark.parametrize(
    "text", ["", "no json", '{"question": "a"}', '{"conversations": []}', "[1]", '{"prompt": [{}, {}]}']
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with rejected("prompts-unreadable", key="--dataset"):
        read_prompts(tmp_path / "a", COMPLETIONS)

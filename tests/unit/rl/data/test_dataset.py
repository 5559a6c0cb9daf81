import json

import pytest
from tests.support.rejections import rejected

from posttrain.rl.data.dataset import load_prompts, write_prompts
from posttrain.types import Prompt, TrajectoryGroup

USER = ({"role": "user", "content": "é {x} \u2028"},)
PROMPTS = [
    Prompt(0, USER, "2"),
    Prompt(1, USER, {"any": [1.5, None, True]}, source="maths", columns={"level": 3}, tools=[{"name": "add"}]),
    Prompt(2, USER, None),
]


def test_prompts_come_back_as_they_were(tmp_path):
    write_prompts(tmp_path / "train.jsonl", PROMPTS)
    assert load_prompts(tmp_path / "train.jsonl") == PROMPTS


def test_a_line_says_no_more_than_there_is(tmp_path):
    """A dataset of prompts and labels alone has the bytes that it always had."""
    write_prompts(tmp_path / "train.jsonl", PROMPTS)
    lines = (tmp_path / "train.jsonl").read_text().split("\n")
    assert lines[0] == '{"prompt": [{"role": "user", "content": "é {x} \u2028"}], "label": "2"}'
    assert list(json.loads(lines[1])) == ["prompt", "label", "source", "columns", "tools"]


def test_a_stored_rollout_has_its_prompt_whole_and_older_ones_are_read():
    old = {"prompt": {"prompt_id": 3, "messages": list(USER), "label": "2"}, "samples": []}
    assert TrajectoryGroup.from_dict(old) == TrajectoryGroup(Prompt(3, USER, "2"), ())
    assert TrajectoryGroup(Prompt(3, USER, "2"), ()).as_dict()["prompt"].keys() == old["prompt"].keys()
    for prompt in PROMPTS:
        stored = json.loads(json.dumps(TrajectoryGroup(prompt, ()).as_dict()))
        assert TrajectoryGroup.from_dict(stored).prompt == prompt


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", []),
        ('{"prompt": [], "label": 1}\n{"prompt": []}\n', ["line 2: "]),
        ('{"question": [], "answer": "1"}\n', ["line 1: 'prompt'"]),
        ('{"prompt": [], "label": 1, "more": 2}\n', ["line 1: ", "'more'"]),
        ('{"prompt": \n', ["line 1: ", "JSON"]),
    ],
)
def test_other_files_are_none(tmp_path, content, found):
    (tmp_path / "train.jsonl").write_text(content)
    with rejected("not-our-dataset", *found, key=str(tmp_path / "train.jsonl")):
        load_prompts(tmp_path / "train.jsonl")

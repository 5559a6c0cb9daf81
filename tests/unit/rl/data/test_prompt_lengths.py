"""Which prompts are too long, and what is said of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.rollout import Rollout
from posttrain.rl.data.dataset import load_prompts, write_prompts
from posttrain.rl.data.prompt_lengths import PromptLengths, check_lengths, read_left_out
from posttrain.types import Prompt

PROMPTS = [Prompt(i, ({"role": "user", "content": str(i)},), "1", "ab"[i // 3]) for i in range(6)]
LENGTHS = [4, 9, 2, 7, 7, 8]


def checked(limit: int, choice: str):
    rollout = Rollout(8, 8, 64, temperature=1.0, fp8=False, max_prompt_tokens=limit, overlong_prompts=choice)
    return check_lengths(PromptLengths(PROMPTS, LENGTHS, limit), rollout)


@pytest.mark.parametrize(("limit", "too_long"), [(0, []), (9, []), (8, [1]), (7, [1, 5]), (1, [0, 1, 2, 3, 4, 5])])
def test_a_prompt_is_too_long_above_the_limit(limit: int, too_long: list[int]) -> None:
    found = PromptLengths(PROMPTS, LENGTHS, limit)
    assert found.too_long == too_long
    assert found.summary == (2, 7, 9)


def test_the_median_is_the_middle_and_each_prompt_has_a_length() -> None:
    assert PromptLengths(PROMPTS[:4], [4, 1, 3, 2], 0).summary == (1, 3, 4)
    with pytest.raises(ValueError, match="shorter"):
        _ = PromptLengths(PROMPTS, LENGTHS[:5], 1).too_long


def test_nothing_is_said_of_prompts_that_fit() -> None:
    assert checked(9, "refuse") == checked(0, "drop") == ([], [])


def test_they_are_refused_or_left_out_and_counted() -> None:
    (refused,), known = checked(8, "refuse")
    assert refused.value == "8, and 1 of 6 prompts (16.7%) are longer; the longest has 9 tokens"
    assert "rollout.overlong_prompts=drop" in refused.remedy
    assert known == []
    refusals, (known_one,) = checked(8, "drop")
    assert refusals == []
    assert (refused.code, known_one.code) == ("prompts-too-long", "prompts-left-out")
    for problem in (refused, known_one):
        assert (problem.key, problem.value) == ("rollout.max_prompt_tokens", refused.value)


def test_a_source_of_which_nothing_is_left_is_refused_by_name() -> None:
    (refused,), known = checked(6, "drop")
    assert refused.value.endswith("none of b is left")
    assert (refused.code, refused.key) == ("prompts-too-long", "rollout.max_prompt_tokens")
    assert known == []
    (refused,), _ = checked(1, "drop")
    assert refused.value.endswith("none of a, b is left")


def test_what_is_left_out_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text('{"left_out": [1, 5]}')
    write_prompts(tmp_path / "train.jsonl", PROMPTS)
    left = load_prompts(tmp_path / "train.jsonl", read_left_out(tmp_path / "check.json"))
    assert [prompt.prompt_id for prompt in left] == [0, 2, 3, 4]
    assert left == [dataclasses.replace(PROMPTS[i]) for i in (0, 2, 3, 4)]

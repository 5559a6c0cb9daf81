"""Responses that the data give as the rollout of a step: a function of the step's number alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.config.derived import uses_engines
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.rollout.offline_responses import OfflineResponses
from posttrain.rl.training.assembly import objective_of
from posttrain.types import Prompt

CONFIG = Path(__file__).parents[4] / "config"
SETTINGS = "rollout.rollout_batch_size=3 training.global_batch_size=3 data.seed=9"
PROMPTS = [
    Prompt(i, ({"role": "user", "content": f"say {i}"},), f"yes {i}", columns={"why": f"no {i}"}) for i in range(5)
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    made = make_tokenizer(256)
    made.save_pretrained(tmp_path)
    stops = [made.convert_tokens_to_ids(token) for token in STOP_TOKENS]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(tmp_path)


def config_of(overrides: str = "", recipe: str = "sft"):
    request = {"model": "tiny_qwen3", "site": "local", "recipe": recipe, "set": f"{SETTINGS} {overrides}"}
    return resolve(request, CONFIG).config


def collect(config, tokenizer: ChatTokenizer, step: int, prompts=PROMPTS):
    return asyncio.run(OfflineResponses(config, prompts, tokenizer).collect(step)).groups


def order_of(epoch: int) -> list[int]:
    """The documented shuffle: a function of seed and epoch alone."""
    places = list(range(5))
    random.Random(f"prompt order, seed 9, epoch {epoch}").shuffle(places)
    return places


def test_steps_take_the_rows_in_the_order_of_epochs(tokenizer: ChatTokenizer) -> None:
    taken = [[group.prompt.prompt_id for group in collect(config_of(), tokenizer, step)] for step in (0, 1, 2)]
    assert taken == [order_of(0)[:3], order_of(0)[3:] + order_of(1)[:1], order_of(1)[1:4]]
    assert collect(config_of(), tokenizer, 1) == collect(config_of(), tokenizer, 1)


def test_a_group_has_the_one_response_that_is_given(tokenizer: ChatTokenizer) -> None:
    for group in collect(config_of(), tokenizer, 0):
        (sample,) = group.trajectories
        number = group.prompt.prompt_id
        assert sample.prompt_tokens == tokenizer.render(group.prompt.messages)
        assert tokenizer.tokenizer.decode(list(sample.sampled_tokens)) == f"yes {number}<|user|>"
        assert (sample.finish_reason, sample.logprobs, sample.versions) == ("stop", (), ())
        assert (sample.sample_index, sample.reward) == (0, 0.0)
    rollout = asyncio.run(OfflineResponses(config_of(), PROMPTS[:1], tokenizer).collect(0))
    assert ([group.prompt.prompt_id for group in rollout.groups], rollout.num_replayed) == ([0, 0, 0], 0)


def test_another_column_is_the_response_while_the_label_is_graded(tokenizer: ChatTokenizer) -> None:
    groups = collect(
        config_of("data.kind=files data.train_file=a data.heldout_file=b data.response_key=why"), tokenizer, 0
    )
    answers = [tokenizer.decode(group.trajectories[0].sampled_tokens) for group in groups]
    assert answers == [f"no {group.prompt.prompt_id}" for group in groups]
    assert groups[0].prompt.label.startswith("yes")


def test_a_longer_response_is_cut_as_an_engine_cuts_it(tokenizer: ChatTokenizer) -> None:
    (sample,) = collect(config_of("rollout.max_response_tokens=4"), tokenizer, 0)[0].trajectories
    assert tokenizer.decode(sample.sampled_tokens) == "yes "
    assert sample.finish_reason == "length"
    # Five characters and the token that ends the response.
    (sample,) = collect(config_of("rollout.max_response_tokens=6"), tokenizer, 0)[0].trajectories
    assert (sample.num_sampled, sample.finish_reason) == (6, "stop")


def test_what_cannot_be_rendered_is_known_before_anything_is_trained(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with rejected("prompts-too-long", "prompt 0 has "):
        OfflineResponses(config_of("rollout.max_prompt_tokens=1"), PROMPTS, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no turns') }}")
    with rejected("template-rejects-messages", "no turns"):
        OfflineResponses(config_of(), PROMPTS, ChatTokenizer(tmp_path))


def test_rows_without_a_response_are_counted_before_anything_is_trained(tokenizer: ChatTokenizer) -> None:
    prompts = [
        *PROMPTS,
        Prompt(5, PROMPTS[0].messages, 7),
        Prompt(6, PROMPTS[0].messages, [{"role": "user", "content": "a"}]),
    ]
    with pytest.raises(ConfigError) as caught:
        OfflineResponses(config_of(), prompts, tokenizer)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("label-missing", "data.label_key")
    assert problem.value.startswith("2 of 7 rows, the first number 6")
    assert "data.response_key" in problem.remedy
    message = Prompt(0, PROMPTS[0].messages, [{"role": "assistant", "content": "well"}])
    (sample,) = collect(config_of(), tokenizer, 0, [message])[0].trajectories
    assert tokenizer.decode(sample.sampled_tokens) == "well"


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3"])
def test_who_has_engines_is_whose_objective_needs_a_rollout(model: str) -> None:
    for config in (config_of(), resolve({"model": model, "site": "local"}, CONFIG).config):
        assert objective_of(config).needs.rollout == uses_engines(config) == (config.training.objective == "rl")
        other = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, old_logprobs="engine"))
        assert objective_of(other).needs.rollout == uses_engines(other)

"""The canary of a training: the trainer's own log-probabilities at temperature 1, against transformers."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch
from tests.support.small_updates import SETTINGS, rollout, trained_config
from tests.unit.rl.megatron_backend import conftest as one_rank

from posttrain.rl.training import reference_logprobs
from posttrain.rl.training.reference_logprobs import (
    MOST_TOKENS,
    NUM_PROMPTS,
    choose_trajectories,
    record_reference_logprobs,
)
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

checkpoint, make_policy = one_rank.checkpoint, one_rank.make_policy
make_reference, reference = one_rank.make_reference, one_rank.reference


def asked() -> list[TrajectoryGroup]:
    return [
        dataclasses.replace(group, prompt=Prompt(group.prompt.prompt_id, ({"role": "user", "content": "?"},), ""))
        for group in rollout(0)
    ]


def test_it_is_what_transformers_says_of_the_same_tokens(make_policy, reference) -> None:
    config = trained_config()
    data = dataclasses.replace(config.data, chat_template_kwargs=["effort=high"])
    config = dataclasses.replace(config, data=data)
    policy = make_policy(config)
    found = record_reference_logprobs(config, policy, asked())
    assert found is not None
    assert policy.chunks[0].temperature == SETTINGS.temperature != 1.0, "as before"
    assert (found.trainer, found.template_kwargs) == ("fp32", {"effort": "high"})
    assert len(found.prompts) == NUM_PROMPTS
    for prompt in found.prompts:
        whole = torch.tensor([[*prompt.prompt_tokens, *prompt.response_tokens]])
        with torch.no_grad():
            logprobs = reference(whole).logits[0, len(prompt.prompt_tokens) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(prompt.response_tokens)[:, None])[:, 0]
        assert prompt.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert prompt.messages == ({"role": "user", "content": "?"},)


def test_it_is_of_different_prompts_and_of_short_ones() -> None:
    chosen = choose_trajectories(rollout(0)[::-1])
    assert [(prompt.prompt_id, sample.sample_index) for prompt, sample in chosen] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    of_one = choose_trajectories(rollout(0)[:1])
    assert [sample.sample_index for _, sample in of_one] == [0, 1, 2, 3]


def test_a_long_response_is_cut(make_policy) -> None:
    config = trained_config()
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=256))
    sample = Trajectory.of_response(
        (5, 6, 7), tuple(range(2, 50)) * 2, (-1.0,) * 96, 0, prompt_id=0, finish_reason="length", reward=0.0
    )
    found = record_reference_logprobs(config, make_policy(config), [TrajectoryGroup(Prompt(0, (), ""), (sample,))])
    assert found is not None
    assert len(found.prompts[0].logprobs) == len(found.prompts[0].response_tokens) == MOST_TOKENS


def test_of_several_turns_the_first_is_recorded(make_policy, make_reference) -> None:
    config = trained_config()
    tokens, mask = (5, 6, 7, 8, 9, 10, 11, 12), (0, 0, 1, 1, 0, 0, 1, 1)
    one = Trajectory(0, 0, tokens, mask, (), (), "stop", 0.0)
    found = record_reference_logprobs(config, make_policy(config), [TrajectoryGroup(Prompt(0, (), ""), (one,))])
    assert found is not None
    (prompt,) = found.prompts
    assert (tuple(prompt.prompt_tokens), tuple(prompt.response_tokens)) == ((5, 6), (7, 8))
    with torch.no_grad():
        logprobs = make_reference()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert prompt.logprobs == pytest.approx([logprobs[1, 7].item(), logprobs[2, 8].item()], abs=1e-4)


def test_a_model_without_numbers_has_none(make_policy, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    config = trained_config()
    policy = make_policy(config)
    rows = reference_logprobs.compute_logprobs

    def spoiled(*arguments):
        return [row * math.nan for row in rows(*arguments)]

    monkeypatch.setattr(reference_logprobs, "compute_logprobs", spoiled)
    with caplog.at_level(logging.WARNING):
        assert record_reference_logprobs(config, policy, asked()) is None
    assert "not finite" in caplog.text

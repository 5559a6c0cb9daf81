"""Trajectories with several sampled stretches, on real Megatron."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.independent_grpo import IndependentGrpo, advantages
from tests.support.small_updates import (
    LR,
    SAMPLES_PER_UPDATE,
    SETTINGS,
    apply,
    objective_of,
    rollout,
    trained_config,
    weights_of,
    with_turns,
)

from posttrain.types import Prompt, Trajectory, TrajectoryGroup


def test_an_agents_trajectories_are_trained_where_the_model_sampled(make_policy, make_reference) -> None:
    """Several sampled stretches: every number and every weight, against GRPO written a second time."""
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    policy, other = make_policy(trained_config()), IndependentGrpo(make_reference(), SETTINGS)
    grpo, groups, start = objective_of(policy), [with_turns(group) for group in rollout(0)], other.weights()
    first = make_updates(policy.config, grpo, groups, dp_rank=0)[0]
    assert sum("10" in "".join(map(str, one.loss_mask)).rstrip("0") for one in first.trajectories) >= 6
    old = [torch.full((one.num_sampled,), -4.0) for one in first.trajectories]
    values = advantages([[one.reward for one in group.trajectories] for group in groups])[:SAMPLES_PER_UPDATE]
    rows = [torch.where(batch.loss_mask > 0, -4.0, 0.0) for batch in first.batches]
    with torch.no_grad():
        expected = [other.logprobs(one.tokens, one.loss_mask) for one in first.trajectories]
    for batch, row in zip(first.batches, train_step.compute_logprobs(policy, first.batches), strict=True):
        for index, found in batch.response_values(row).items():
            assert (found - expected[index]).abs().max() <= 1e-5
    said = dataclasses.asdict(apply(policy, first.with_old_logprobs(rows), LR))
    theirs = other.update(first.trajectories, old, values, LR)
    for name, value in (said | said["named"]).items():
        assert name in ("named", "outcome") or value == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    ours, expected_weights = weights_of(policy), other.weights()
    for name in expected_weights.keys() & ours.keys():
        move = (expected_weights[name] - start[name]).norm()
        assert (ours[name] - expected_weights[name]).norm() <= 1e-5 * move + 1e-7 * start[name].norm(), name


def test_two_stretches_have_the_loss_of_two_separately_masked_trajectories(make_policy) -> None:
    from posttrain.rl.algorithm.sft import SupervisedFineTuning
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    policy, sft = make_policy(trained_config()), SupervisedFineTuning("token_mean", longest=32)
    tokens = tuple(range(5, 17))
    both, first, second = (
        (0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0),
        (0,) * 3 + (1,) * 2 + (0,) * 7,
        (0,) * 8 + (1,) * 3 + (0,),
    )
    sums = []
    for masks in ([both], [first, second]):
        ones = [Trajectory(0, i, tokens, mask, (), (), "stop", 0.0) for i, mask in enumerate(masks)]
        (update,) = make_updates(policy.config, sft, [TrajectoryGroup(Prompt(0, (), ""), tuple(ones))], dp_rank=0)
        said = train_step.update(policy, sft, update.micro_batches(sft.needs), lr=0.0)
        assert said.num_tokens == 5
        sums.append((said.loss, said.grad_norm))
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)

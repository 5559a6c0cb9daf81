"""Supervised fine-tuning against transformers: loss and gradient of a batch of several micro-batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.support.hub_tensors import fill
from tests.support.independent_grpo import by_hub_name
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.packed_rows import gradients_by_hub_name
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint

from posttrain.plan.resolve import resolve
from posttrain.rl.training.assembly import objective_of
from posttrain.rl.training.batch import make_updates
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

CONFIG = Path(__file__).parents[4] / "config"
# Tokens of each trajectory, in turn read and to be learned: one response to a prompt, or several turns.
STRETCHES = ((5, 9), (17, 1), (2, 30), (8, 3, 4, 1), (21, 14), (3, 3, 1, 2, 6, 1, 2))


def given() -> list[TrajectoryGroup]:
    generator, groups = torch.Generator().manual_seed(11), []
    for number, stretches in enumerate(STRETCHES):
        # Tokens 0 and 1 are left out: transformers gives the padding token's embedding no gradient.
        tokens = torch.randint(2, TINY_QWEN3.vocab_size, (sum(stretches),), generator=generator).tolist()
        mask = tuple(place % 2 for place, length in enumerate(stretches) for _ in range(length))
        sample = Trajectory(number, 0, tuple(tokens), mask, (), (), "stop", 0.0)
        groups.append(TrajectoryGroup(Prompt(number, ({"role": "user", "content": "a"},), "b"), (sample,)))
    return groups


def reference(folder: Path) -> tuple[float, dict[str, torch.Tensor], int]:
    """What transformers makes of the same batch: right-padded, labels of -100 on what is only read, token mean."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    samples = [group.trajectories[0] for group in given()]
    shape = len(samples), max(sample.num_tokens for sample in samples)
    inputs, labels, mask = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100), torch.zeros(shape)
    for row, sample in enumerate(samples):
        inputs[row, : sample.num_tokens] = torch.tensor(sample.tokens)
        mask[row, : sample.num_tokens] = 1
        labels[row, torch.tensor(sample.loss_mask).nonzero()[:, 0]] = torch.tensor(sample.sampled_tokens)
    loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
    loss.backward()
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return loss.item(), dict(pair for name, grad in gradients for pair in by_hub_name(name, grad)), int(mask.sum())


def test_loss_and_gradient_equal_transformers(tmp_path: Path) -> None:
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights

    tensors = make_random_checkpoint(tmp_path, TINY_QWEN3, seed=5)
    config, recipe = (
        test_config(TINY_QWEN3),
        resolve({"model": "tiny", "site": "local", "recipe": "sft"}, CONFIG).config,
    )
    rollout = dataclasses.replace(recipe.rollout, rollout_batch_size=len(STRETCHES))
    config = dataclasses.replace(
        config,
        algorithm=recipe.algorithm,
        rollout=rollout,
        training=dataclasses.replace(recipe.training, global_batch_size=len(STRETCHES)),
        trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=48),
    )
    initialize_single_rank(config)
    policy = build_policy(config)
    weights = HubWeights(policy.chunks, config.model.architecture)
    fill(weights, tensors)
    assert policy.optimizer is not None
    policy.optimizer.reload_model_params()
    objective, found = objective_of(config), []
    (update,) = make_updates(config, objective, given(), dp_rank=0)
    assert len(update.batches) > 2
    batches = update.micro_batches(objective.needs)
    said = train_step.update(
        policy, objective, batches, 1e-4, look=lambda _: found.append(gradients_by_hub_name(policy, weights))
    )
    loss, gradients, num_tokens = reference(tmp_path)
    assert sum(map(sum, STRETCHES)) == num_tokens
    assert said.num_tokens == sum(sum(stretches[1::2]) for stretches in STRETCHES)
    assert said.loss == pytest.approx(loss, rel=1e-5)
    assert said.named["logprob_mean"] == pytest.approx(-loss, rel=1e-5)
    assert loss > 3, "of random weights"
    assert gradients.keys() == found[0].keys()
    wrong = {name: float((found[0][name] - g).abs().max() / g.abs().max()) for name, g in gradients.items()}
    assert {name: off for name, off in wrong.items() if not off <= 1e-5} == {}

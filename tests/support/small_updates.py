"""Updates of a small model as the trainer makes them: their configuration, their samples, and the step itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from tests.support.independent_grpo import Settings
from tests.support.megatron_single import test_config
from tests.support.tiny_checkpoint import TRAINED

from posttrain.types import Prompt, Trajectory, TrajectoryGroup

LR, UPDATES_PER_STEP, SAMPLES_PER_UPDATE = 1e-3, 2, 12
# Three steps of warm-up, by hand.
LEARNING_RATES = (LR / 3, 2 * LR / 3, LR, LR)
# None of them is a default of ours, of torch's or of Megatron's. Bounds as narrow as these clip every second token.
SETTINGS = Settings(
    temperature=0.8, clip_low=0.02, clip_high=0.03, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3, max_norm=0.7
)


def trained_config(**algorithm):
    config = test_config(TRAINED)
    sections = {
        # Three or four micro-batches in each update.
        "trainer": {"max_tokens_per_gpu": 96},
        "training": {"global_batch_size": SAMPLES_PER_UPDATE},
        "rollout": {"temperature": SETTINGS.temperature},
        "algorithm": {"clip_ratio_low": SETTINGS.clip_low, "clip_ratio_high": SETTINGS.clip_high, **algorithm},
        "optimizer": {
            "lr": LR,
            "lr_warmup_steps": 3,
            "beta1": SETTINGS.betas[0],
            "beta2": SETTINGS.betas[1],
            "eps": SETTINGS.eps,
            "weight_decay": SETTINGS.weight_decay,
            "clip_grad": SETTINGS.max_norm,
        },
    }
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def rollout(step: int, num_groups: int = 6, size: int = 4) -> list[TrajectoryGroup]:
    """Responses of all lengths to prompts of all lengths, with rewards that differ, but for one group."""
    generator = np.random.default_rng(step)
    groups = []
    for prompt_id in range(num_groups):
        # Tokens 0 and 1 are left out: transformers gives the padding token's embedding no gradient.
        prompt = tuple(generator.integers(2, TRAINED.vocab_size, 5 + 3 * prompt_id).tolist())
        samples = []
        for place in range(size):
            response = tuple(generator.integers(2, TRAINED.vocab_size, 1 + 4 * place + prompt_id).tolist())
            reward = 0.5 if prompt_id == 3 else float(np.float32(generator.random()))
            logprobs = (-4.0,) * len(response)
            samples.append(
                Trajectory.of_response(
                    prompt, response, logprobs, step, prompt_id=prompt_id, sample_index=place, reward=reward
                )
            )
        groups.append(TrajectoryGroup(Prompt(prompt_id, (), ""), tuple(samples)))
    return groups


def with_turns(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return a group of which the model only read the second, third and fifth token of each response."""

    def turned(one: Trajectory) -> Trajectory:
        gaps = {len(one.prompt_tokens) + place for place in (1, 2, 4)}
        mask = tuple(int(sampled and place not in gaps) for place, sampled in enumerate(one.loss_mask))
        return dataclasses.replace(one, loss_mask=mask, logprobs=one.logprobs[: sum(mask)], versions=())

    return dataclasses.replace(group, trajectories=tuple(map(turned, group.trajectories)))


def objective_of(policy):
    from posttrain.rl.algorithm.policy_gradient import PolicyGradient

    return PolicyGradient(policy.config.algorithm, policy.config.rollout.max_response_tokens)


def apply(policy, update, lr: float):
    """Make an update as the trainer does."""
    from posttrain.rl.megatron_backend import train_step

    objective = objective_of(policy)
    return train_step.update(policy, objective, update.micro_batches(objective.needs), lr)


def weights_of(policy) -> dict[str, torch.Tensor]:
    from posttrain.rl.megatron_backend.weights import HubWeights

    return dict(HubWeights(policy.chunks, TRAINED).gather(dtype=torch.float32))


def updates_of(policy, step: int):
    """Return the updates of a rollout with their old log-probabilities, as the loop makes them."""
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.training.batch import make_updates

    updates = make_updates(policy.config, objective_of(policy), rollout(step), dp_rank=0)
    return [update.with_old_logprobs(train_step.compute_logprobs(policy, update.batches)) for update in updates]

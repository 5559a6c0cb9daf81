"""Reference log-probabilities: the trainer's after its last update, which a server of the weights must reproduce.

The texts are prompts of the last step with their sampled responses. The model finds these likely, so an engine with
wrong weights or wrong scales differs clearly at every token.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from itertools import takewhile

from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt
from posttrain.config.schema import Config
from posttrain.rl.data.chat import parse_template_kwargs
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.plain_data import gather_plain
from posttrain.rl.megatron_backend.ranks import data_parallel_rank
from posttrain.rl.megatron_backend.train_step import compute_logprobs
from posttrain.rl.training.batch import pack_trajectories
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

NUM_PROMPTS = 4
# Tokens per continuation: more add little evidence, and the file is part of every exported copy.
MOST_TOKENS = 64


def record_reference_logprobs(
    config: Config, policy: Policy, groups: Sequence[TrajectoryGroup]
) -> ReferenceLogprobs | None:
    """Return the reference log-probabilities of the current weights; collective.

    Args:
        config: The resolved configuration.
        policy: The model, in its training precision.
        groups: The last step's.

    Returns:
        The same on every rank; None if the log-probabilities are not finite.
    """
    chosen = choose_trajectories(groups)
    if config.data.environment:  # which decides what the model is asked
        chosen = [(dataclasses.replace(prompt, messages=()), one.segments()[0]) for prompt, one in chosen]
    batches, _ = pack_trajectories(config, [trajectory for _, trajectory in chosen], data_parallel_rank())
    own: list[tuple[int, list[float]]] = []
    # Servers report log-probabilities at temperature 1, whatever temperature rollouts used.
    with policy.at_temperature(1.0):
        rows = compute_logprobs(policy, batches)
    # Only the last pipeline stage has them; all its tensor-parallel ranks hold the same.
    for batch, row in zip(batches, rows, strict=False):
        own += [(index, values.tolist()) for index, values in batch.response_values(row.cpu()).items()]
    found = {index: values for of_rank in gather_plain(own) for index, values in of_rank}
    if not all(math.isfinite(value) for values in found.values() for value in values):
        log.warning("the trained model's log-probabilities are not finite: nothing to hold a server against")
        return None
    prompts = [_prompt(prompt, trajectory, found[index]) for index, (prompt, trajectory) in enumerate(chosen)]
    kwargs = parse_template_kwargs(config.data.chat_template_kwargs)
    return ReferenceLogprobs(config.trainer.params_dtype, kwargs, prompts)


def choose_trajectories(groups: Sequence[TrajectoryGroup]) -> list[tuple[Prompt, Trajectory]]:
    """Return a few short trajectories with their prompts, spread over as many prompts as possible."""
    known = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    return sorted(known, key=lambda item: (item[1].sample_index, len(item[1].prompt_tokens), item[1].prompt_id))[
        :NUM_PROMPTS
    ]


def _prompt(prompt: Prompt, trajectory: Trajectory, logprobs: Sequence[float]) -> ReferencePrompt:
    asked = trajectory.prompt_tokens
    # The first sampled stretch: a server is asked for a continuation of the prompt.
    stretch = len(list(takewhile(bool, trajectory.loss_mask[len(asked) :][:MOST_TOKENS])))
    # Rounding may leave the value slightly above 0.
    values = [min(0.0, value) for value in logprobs[:stretch]]
    return ReferencePrompt(prompt.messages, prompt.tools, asked, trajectory.sampled_tokens[:stretch], values)

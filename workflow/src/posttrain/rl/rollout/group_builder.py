"""Renders prompts as requests, and turns the engines' answers into graded groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from posttrain.config.derived import token_budget
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.rl.algorithm.advantage.grpo import RESOLUTION
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import GenerateRequest, GenerateResult
from posttrain.rl.engines.routes import RoutesLayout
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer
from posttrain.rl.rollout.response_text import answer_of
from posttrain.types import Prompt, Routes, Trajectory, TrajectoryGroup


class GroupBuilder:
    """Makes requests of prompts and groups of answers.

    Args:
        config: The resolved configuration.
        tokenizer: Renders prompts and decodes responses.
        graders: Grade responses.
    """

    def __init__(self, config: Config, tokenizer: ChatTokenizer, graders: GraderPool):
        self._config, self._tokenizer, self._scorer = config, tokenizer, Scorer(config, graders)
        has_routes = config.algorithm.routing_replay
        self._routes = RoutesLayout.of(config.model.architecture) if has_routes else None

    def requests(self, prompt: Prompt, step_or_tag: int | str, place: int) -> list[GenerateRequest]:
        """Return one request per trajectory of a prompt.

        Args:
            prompt: The prompt.
            step_or_tag: For the seeds; see `sampling_seed`.
            place: For the seeds: unique among the prompts with the same `step_or_tag`.
        """
        rollout, tokens = self._config.rollout, self._tokenizer.render(prompt.messages, prompt.tools)
        longest = longest_response(self._config, prompt.prompt_id, len(tokens))
        return [
            GenerateRequest(
                input_ids=tuple(tokens),
                sampling_seed=sampling_seed(self._config.training.seed, step_or_tag, place, index),
                max_new_tokens=longest,
                temperature=rollout.temperature,
                routes=self._routes,
            )
            for index in range(rollout.num_samples_per_prompt)
        ]

    async def grade(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        answers: Sequence[GenerateResult],
        routes: Sequence[Routes | None] = (),
    ) -> list[TrajectoryGroup]:
        """Return the graded groups of prompts.

        Args:
            prompts: The prompts.
            requests: Of all prompts, from `requests`.
            answers: One per request.
            routes: One per request; empty if not recorded.
        """
        size = self._config.rollout.num_samples_per_prompt
        graded = [answer_of(prompts[i // size], self._tokenizer, answers[i]) for i in range(len(answers))]
        scored = await self._scorer.score([graded[start : start + size] for start in range(0, len(graded), size)])
        recorded = routes or [None] * len(answers)
        trajectories = [
            _trajectory(prompts[i // size], i % size, requests[i], answers[i], scored[i // size][i % size], recorded[i])
            for i in range(len(requests))
        ]
        cut = [tuple(trajectories[start : start + size]) for start in range(0, len(trajectories), size)]
        return [TrajectoryGroup(without_columns(prompt), some) for prompt, some in zip(prompts, cut, strict=True)]


def without_columns(prompt: Prompt) -> Prompt:
    """Return a prompt for storage: without the columns, which may be large and which only graders need."""
    return dataclasses.replace(prompt, columns={})


def has_failures(groups: Sequence[TrajectoryGroup]) -> bool:
    """Return whether a grader failed for any trajectory."""
    return any(trajectory.failure for group in groups for trajectory in group.trajectories)


def has_equal_rewards(group: TrajectoryGroup) -> bool:
    """Return whether a group's rewards are all equal, which gives no signal; see `rl.algorithm.advantage.grpo`."""
    rewards = [one.reward for one in group.trajectories if one.reward is not None]
    return not rewards or max(rewards) - min(rewards) <= RESOLUTION * max(map(abs, rewards))


def longest_response(config: Config, prompt_id: int, num_prompt_tokens: int) -> int:
    """Return the maximum response tokens for a prompt, so that both fit into the trainer's context.

    Args:
        config: The resolved configuration.
        prompt_id: Names the prompt in errors.
        num_prompt_tokens: Its length.

    Raises:
        ConfigError: The prompt is longer than `rollout.max_prompt_tokens`, or leaves no room for a response.
    """
    rollout, found = config.rollout, f"prompt {prompt_id} has {num_prompt_tokens} tokens"
    if 0 < rollout.max_prompt_tokens < num_prompt_tokens:
        remedy = "raise it, or leave the prompt out of the data"
        raise ConfigError(
            [Problem("prompts-too-long", "rollout.max_prompt_tokens", str(rollout.max_prompt_tokens), found, remedy)]
        )
    if rollout.overlong_samples != "cut":
        return rollout.max_response_tokens
    left = token_budget(config) - num_prompt_tokens
    if left < 1:
        key, budget = "trainer.max_tokens_per_gpu", str(config.trainer.max_tokens_per_gpu)
        allowed = f"more than a prompt with rollout.overlong_samples=cut; {found}"
        raise ConfigError(
            [Problem("prompts-too-long", key, budget, allowed, "raise the budget, or leave the prompt out of the data")]
        )
    return min(rollout.max_response_tokens, left)


def _trajectory(
    prompt: Prompt, index: int, request: GenerateRequest, answer: GenerateResult, scored: Scored, routes: Routes | None
) -> Trajectory:
    assert answer.logprobs, f"the engine sampled {len(answer.output_ids)} tokens without their log-probabilities"
    return Trajectory.of_response(
        request.input_ids,
        answer.output_ids,
        answer.logprobs,
        versions=answer.versions,
        prompt_id=prompt.prompt_id,
        sample_index=index,
        finish_reason=answer.finish_reason,
        reward=scored.reward,
        scores=scored.scores,
        parts=scored.parts,
        failure=scored.failure,
        routes=routes,
    )

"""Renders prompts as requests, and grades episodes in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from posttrain.config.schema import Config
from posttrain.rl.algorithm.advantage.grpo import RESOLUTION
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import GenerateRequest
from posttrain.rl.engines.routes import RoutesLayout
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer
from posttrain.rl.rollout.episode import Episode
from posttrain.rl.rollout.response_limit import longest_response
from posttrain.rl.rollout.response_text import answer_of
from posttrain.types import Prompt, Routes, Trajectory, TrajectoryGroup


class GroupBuilder:
    """Makes requests of prompts and groups of episodes.

    Args:
        config: The resolved configuration.
        tokenizer: Renders prompts and decodes responses.
        graders: Grade responses.

    Attributes:
        routes: Layout in which engines report expert routes; None without routing replay.
    """

    def __init__(self, config: Config, tokenizer: ChatTokenizer, graders: GraderPool):
        self._config, self._tokenizer, self._scorer = config, tokenizer, Scorer(config, graders)
        has_routes = config.algorithm.routing_replay
        self.routes = RoutesLayout.of(config.model.architecture) if has_routes else None

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
                routes=self.routes,
            )
            for index in range(rollout.num_samples_per_prompt)
        ]

    async def grade(
        self,
        prompts: Sequence[Prompt],
        episodes: Sequence[Episode],
        routes: Sequence[tuple[Routes, ...]] = (),
    ) -> list[TrajectoryGroup]:
        """Return the graded groups of prompts.

        Args:
            prompts: The prompts.
            episodes: `rollout.num_samples_per_prompt` of each prompt, in order.
            routes: Of each episode, if they are stored already.
        """
        size = self._config.rollout.num_samples_per_prompt
        graded = [answer_of(prompts[i // size], self._tokenizer, one) for i, one in enumerate(episodes)]
        scored = await self._scorer.score([graded[start : start + size] for start in range(0, len(graded), size)])
        recorded = routes or [()] * len(episodes)
        trajectories = [
            _trajectory(prompts[i // size], i % size, episode, scored[i // size][i % size], recorded[i])
            for i, episode in enumerate(episodes)
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


def _trajectory(prompt: Prompt, index: int, episode: Episode, scored: Scored, routes: tuple[Routes, ...]) -> Trajectory:
    assert episode.logprobs, f"the engine sampled {sum(episode.loss_mask)} tokens without their log-probabilities"
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample_index=index,
        tokens=episode.tokens,
        loss_mask=episode.loss_mask,
        logprobs=episode.logprobs,
        versions=episode.versions,
        finish_reason=episode.finish_reason,
        reward=scored.reward,
        scores=scored.scores,
        parts={**scored.parts, **episode.parts},
        failure=scored.failure,
        routes=routes,
        segment_lengths=episode.segment_lengths,
    )

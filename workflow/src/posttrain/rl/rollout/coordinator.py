"""Turns prompts into groups of graded trajectories: samples, grades, persists. Runs on the trainer's rank 0.

Each chunk is graded and stored as soon as its answers arrive, while engines decode the others. Files are written in
threads, so that a slow disk delays no answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from posttrain.config.derived import token_budget
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.mixture import PromptMix
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient, GenerateRequest, GenerateResult
from posttrain.rl.engines.routes import RoutesLayout
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer, check_failures
from posttrain.rl.rollout.response_text import answer_of
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Prompt, RolloutResult, Routes, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutCoordinator:
    """Makes the rollout of a step.

    Args:
        config: The resolved configuration.
        prompts: The training prompts; their order is a function of the seed.
        tokenizer: Renders prompts and decodes responses.
        client: Client of the engines.
        store: Finished chunks of this run.
        graders: Grade responses.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        tokenizer: ChatTokenizer,
        client: EngineClient,
        store: RolloutStore,
        graders: GraderPool,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._client, self._store, self._scorer = client, store, Scorer(config, graders)
        self._mix = PromptMix(prompts, config.data)
        has_routes = config.algorithm.routing_replay
        self._routes = RoutesLayout.of(config.model.architecture) if has_routes else None

    async def collect(self, step: int) -> RolloutResult:
        """Return the groups of a step: replay those on disk, generate the others.

        Args:
            step: From 0; determines prompts and seeds.

        Raises:
            EngineError: An engine failed; chunks finished by the others are on disk.
        """
        chunks = self._chunks(step)
        results = await _all_of([self._chunk(step, number, prompts) for number, prompts in enumerate(chunks)])
        groups = [group for groups, _ in results for group in groups]
        failures = [trajectory.failure for group in groups for trajectory in group.trajectories]
        check_failures(failures, self._config.reward.max_failure_share)
        for number, (of_chunk, is_replayed) in enumerate(results):
            if not is_replayed and _has_failures(of_chunk):
                self._store.write(step, number, of_chunk)
        return RolloutResult(groups, sum(len(of_chunk) for of_chunk, is_replayed in results if is_replayed))

    def _chunks(self, step: int) -> list[list[Prompt]]:
        """Split the prompts of a step into the groups of each request."""
        count = self._config.rollout.rollout_batch_size
        prompts = self._mix.take(step * count, count)
        size = self._config.engine.groups_per_request
        return [prompts[start : start + size] for start in range(0, count, size)]

    async def _chunk(self, step: int, number: int, prompts: list[Prompt]) -> tuple[list[TrajectoryGroup], bool]:
        """Return the groups of a chunk, and whether they were on disk."""
        finished = self._store.read(step, number)
        if finished is not None and self._answers(finished, prompts, step, number):
            return finished, True
        first = number * self._config.engine.groups_per_request
        requests = [r for place, prompt in enumerate(prompts, first) for r in self._requests(step, place, prompt)]
        answers = await self._client.generate(requests, request_number=number)
        check_versions(step, answers)
        told = [answer.routes for answer in answers if answer.routes is not None]
        routes = await asyncio.to_thread(self._store.write_routes, step, number, told)
        groups = await self._grade(prompts, requests, answers, routes or [None] * len(answers))
        # Stored chunks are not graded again, so the limit on grader failures applies to the whole step.
        if not _has_failures(groups):
            await asyncio.to_thread(self._store.write, step, number, groups)
        return groups, False

    def _answers(self, groups: list[TrajectoryGroup], prompts: list[Prompt], step: int, number: int) -> bool:
        """Return whether a finished chunk has these prompts; it does not after a change of the request size."""
        wanted = [(_kept(prompt), self._config.rollout.num_samples_per_prompt) for prompt in prompts]
        found = [(group.prompt, len(group.trajectories)) for group in groups]
        if found != wanted:
            log.warning("step %d, chunk %d: made with other settings, generated again", step, number)
        return found == wanted

    def _requests(self, step: int, place: int, prompt: Prompt) -> list[GenerateRequest]:
        """Return one request per trajectory; its seed depends on the prompt's position in the step, which is unique."""
        rollout, tokens = self._config.rollout, self._tokenizer.render(prompt.messages, prompt.tools)
        longest = longest_response(self._config, prompt.prompt_id, len(tokens))
        return [
            GenerateRequest(
                input_ids=tuple(tokens),
                sampling_seed=sampling_seed(self._config.training.seed, step, place, index),
                max_new_tokens=longest,
                temperature=rollout.temperature,
                routes=self._routes,
            )
            for index in range(rollout.num_samples_per_prompt)
        ]

    async def _grade(
        self,
        prompts: list[Prompt],
        requests: list[GenerateRequest],
        answers: list[GenerateResult],
        routes: Sequence[Routes | None],
    ) -> list[TrajectoryGroup]:
        size = self._config.rollout.num_samples_per_prompt
        graded = [answer_of(prompts[i // size], self._tokenizer, answers[i]) for i in range(len(answers))]
        scored = await self._scorer.score([graded[start : start + size] for start in range(0, len(graded), size)])
        trajectories = [
            _trajectory(prompts[i // size], i % size, requests[i], answers[i], scored[i // size][i % size], routes[i])
            for i in range(len(requests))
        ]
        cut = [tuple(trajectories[start : start + size]) for start in range(0, len(trajectories), size)]
        return [TrajectoryGroup(_kept(prompt), of_prompt) for prompt, of_prompt in zip(prompts, cut, strict=True)]


async def _all_of(chunks: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. On an engine failure, wait for the other engines first; raise any other error at once."""

    async def answered(chunk: Coroutine[Any, Any, T]) -> T | EngineError:
        try:
            return await chunk
        except EngineError as error:
            return error

    results = await asyncio.gather(*map(answered, chunks))
    for result in results:
        if isinstance(result, EngineError):
            raise result
    return [result for result in results if not isinstance(result, EngineError)]


def _has_failures(groups: Sequence[TrajectoryGroup]) -> bool:
    return any(trajectory.failure for group in groups for trajectory in group.trajectories)


def _kept(prompt: Prompt) -> Prompt:
    """Return a prompt for storage: without the columns, which may be large and which only graders need."""
    return dataclasses.replace(prompt, columns={})


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


def check_versions(step: int, answers: Sequence[GenerateResult]) -> None:
    """Reject trajectories from any weight version but the step's: a restarted engine would serve the initial ones."""
    expected = (None, 0) if step == 0 else (step,)
    wrong = {span.version for answer in answers for span in answer.versions} - set(expected)
    if wrong:
        raise RuntimeError(
            f"engine served weight version {sorted(map(str, wrong))} in step {step}; expected {expected}"
        )

"""Turns prompts into groups of graded trajectories: samples, grades, persists. Runs on the trainer's rank 0.

Each chunk is graded and stored as soon as its answers arrive, while engines decode the others. Files are written in
threads, so that a slow disk delays no answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from posttrain.config.schema import Config
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.mixture import PromptMix
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient, GenerateResult
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import check_failures
from posttrain.rl.rollout.episode import Episode
from posttrain.rl.rollout.group_builder import GroupBuilder, has_failures, without_columns
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Prompt, RolloutResult, TrajectoryGroup

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
        self._config, self._client, self._store = config, client, store
        self._builder = GroupBuilder(config, tokenizer, graders)
        self._mix = PromptMix(prompts, config.data)

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
            if not is_replayed and has_failures(of_chunk):
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
        requests = [
            r for place, prompt in enumerate(prompts, first) for r in self._builder.requests(prompt, step, place)
        ]
        answers = await self._client.generate(requests, request_number=number)
        check_versions(step, answers)
        episodes = [Episode.of_response(r.input_ids, answer) for r, answer in zip(requests, answers, strict=True)]
        told = [episode.routes for episode in episodes]
        routes = await asyncio.to_thread(self._store.write_routes, step, number, told)
        groups = await self._builder.grade(prompts, episodes, routes)
        # Stored chunks are not graded again, so the limit on grader failures applies to the whole step.
        if not has_failures(groups):
            await asyncio.to_thread(self._store.write, step, number, groups)
        return groups, False

    def _answers(self, groups: list[TrajectoryGroup], prompts: list[Prompt], step: int, number: int) -> bool:
        """Return whether a finished chunk has these prompts; it does not after a change of the request size."""
        wanted = [(without_columns(prompt), self._config.rollout.num_samples_per_prompt) for prompt in prompts]
        found = [(group.prompt, len(group.trajectories)) for group in groups]
        if found != wanted:
            log.warning("step %d, chunk %d: made with other settings, generated again", step, number)
        return found == wanted


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


def check_versions(step: int, answers: Sequence[GenerateResult | Episode]) -> None:
    """Reject trajectories from any weight version but the step's: a restarted engine would serve the initial ones."""
    expected = (None, 0) if step == 0 else (step,)
    wrong = {span.version for answer in answers for span in answer.versions} - set(expected)
    if wrong:
        raise RuntimeError(
            f"engine served weight version {sorted(map(str, wrong))} in step {step}; expected {expected}"
        )

"""Samples the responses or episodes of an evaluation: k of each prompt, with seeds that only depend on the task."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from posttrain.config.schema import Config
from posttrain.config.suites import HELD_OUT
from posttrain.report.progress import ProgressBar
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.rl.rollout.episode import Episode, EpisodeRunner
from posttrain.types import Prompt


async def sample_episodes(
    config: Config, tag: str, prompts: Sequence[Prompt], client: EngineClient, tokenizer: ChatTokenizer
) -> list[Episode]:
    """Return k consecutive episodes per prompt.

    Args:
        config: The task's configuration.
        tag: Separates the seeds of tasks.
        prompts: The prompts.
        client: The engines.
        tokenizer: Renders prompts.
    """
    if config.data.environment:
        return await _play(config, tag, prompts, client, tokenizer)
    rendered = [tokenizer.render(prompt.messages, prompt.tools) for prompt in prompts]
    requests = make_requests(config, prompts, rendered, tag)
    results = await sample_responses(config, client, requests)
    return [Episode.of_response(asked.input_ids, result) for asked, result in zip(requests, results, strict=True)]


async def _play(
    config: Config, tag: str, prompts: Sequence[Prompt], client: EngineClient, tokenizer: ChatTokenizer
) -> list[Episode]:
    places = [(prompt, index) for prompt in prompts for index in range(config.evaluation.num_samples_per_prompt)]
    at_a_time = asyncio.Semaphore(config.engine.max_running_requests * client.num_engines)
    with environments_of(config) as environments:
        runner = EpisodeRunner(
            config,
            tokenizer,
            environments,
            client.parse_tool_calls,
            config.evaluation.temperature,
            limits_prompts=False,
        )
        with ProgressBar("held-out episodes", len(places), "episodes") as progress:

            async def play(prompt: Prompt, index: int) -> Episode:
                def seed_of(name: str) -> int:
                    return sampling_seed(config.evaluation.seed, f"{tag}{name}", prompt.prompt_id, index)

                async def respond(turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
                    seed = seed_of(f", turn {turn}" if turn else "")
                    return await client.sample(dataclasses.replace(request, sampling_seed=seed), engine, waits=False)

                async with at_a_time:
                    try:
                        episode = await runner.play(prompt, seed_of(", environment"), respond)
                    except EnvironmentFailure as failure:
                        episode = Episode.not_begun(failure)
                progress.advance(1)
                return episode

            return await asyncio.gather(*(play(*place) for place in places))


def make_requests(
    config: Config, prompts: Sequence[Prompt], prompt_tokens: Sequence[Sequence[int]], tag: str = HELD_OUT
) -> list[GenerateRequest]:
    """Return k consecutive requests per prompt; the tag separates the seeds of tasks."""
    evaluation = config.evaluation
    return [
        GenerateRequest(
            input_ids=tokens,
            sampling_seed=sampling_seed(evaluation.seed, tag, prompt.prompt_id, index),
            max_new_tokens=config.rollout.max_response_tokens,
            temperature=evaluation.temperature,
        )
        for prompt, tokens in zip(prompts, prompt_tokens, strict=True)
        for index in range(evaluation.num_samples_per_prompt)
    ]


async def sample_responses(
    config: Config, client: EngineClient, requests: Sequence[GenerateRequest]
) -> list[GenerateResult]:
    """Return one result per request.

    Batches are as large as in training, and as many are in flight as the engines run concurrently.
    """
    size = config.engine.groups_per_request * config.rollout.num_samples_per_prompt
    at_a_time = asyncio.Semaphore(max(1, config.engine.max_running_requests // size) * client.num_engines)
    with ProgressBar("held-out responses", len(requests), "responses") as progress:

        async def sample(number: int, batch: Sequence[GenerateRequest]) -> list[GenerateResult]:
            async with at_a_time:
                results = await client.generate(batch, number)
            progress.advance(len(batch))
            return results

        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        answers = await asyncio.gather(*(sample(number, batch) for number, batch in enumerate(batches)))
    return [result for answer in answers for result in answer]

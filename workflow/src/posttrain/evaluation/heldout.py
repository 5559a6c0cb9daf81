"""Accuracy of a served model on held-out prompts.

The same prompts and the same seeds before and after training: sample k of a prompt has the same random
numbers in both, whatever the engines and the batches. `pass_rate` is the share of responses that pass, and
`pass_at_k` the share of prompts of which at least one of the k responses does. A response passes when its
grader gives 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.schema import Config
from posttrain.data.chat import ChatTokenizer
from posttrain.engines.client import EngineClient
from posttrain.engines.process import EngineProcess, check_all_alive, running_engines
from posttrain.engines.responses import GenerateRequest, GenerateResult
from posttrain.engines.sampling_seed import sampling_seed
from posttrain.observability.progress import ProgressBar
from posttrain.reward.answer import Answer
from posttrain.reward.graders import GraderPool, scores_of
from posttrain.types import Prompt

SEED_TAG = "heldout"
# As many as somebody reads in a report.
NUM_EXAMPLES = 24
PASSING_REWARD = 1.0


@dataclass(frozen=True)
class GradedResponse:
    """One response to a held-out prompt.

    Args:
        prompt: What was asked.
        sample_index: 0 to k - 1.
        text: The response without its end token.
        num_tokens: Its length, the end token included.
        is_truncated: It was cut at the longest allowed length.
        reward: Of the grader.
    """

    prompt: Prompt
    sample_index: int
    text: str
    num_tokens: int
    is_truncated: bool
    reward: float


def evaluate_checkpoint(
    config: Config, checkpoint: Path, prompts: Sequence[Prompt], log_folder: Path
) -> dict[str, Any]:
    """Serve a checkpoint, sample every prompt k times, grade, and summarise.

    Args:
        config: The resolved configuration; `evaluation`, `engine`, `rollout.max_response_tokens` and
            `data.reward` count.
        checkpoint: In Hub layout, BF16 or FP8, with tokenizer and chat template.
        prompts: Held-out prompts.
        log_folder: For the engines' logs.

    Returns:
        See `summarize`; `grader_timeouts`, responses that no grader answered in time; and
        `tokens_per_second`, sampled tokens per second of sampling, the one key that differs from run to run.

    Raises:
        RuntimeError: When an engine does not start or fails.
    """
    with running_engines(config, checkpoint, log_folder) as engines:
        # The tokenizer is read while the engines load.
        tokenizer = ChatTokenizer(checkpoint)
        requests = make_requests(config, prompts, [tokenizer.render(prompt.messages) for prompt in prompts])
        results, seconds = asyncio.run(_sample(config, engines, requests))
    graded, num_missed = _grade(config, tokenizer, prompts, results)
    num_tokens = sum(response.num_tokens for response in graded)
    return {**summarize(graded), "grader_timeouts": num_missed, "tokens_per_second": num_tokens / seconds}


def make_requests(
    config: Config, prompts: Sequence[Prompt], prompt_tokens: Sequence[Sequence[int]]
) -> list[GenerateRequest]:
    """Return k requests per prompt, the samples of a prompt side by side."""
    evaluation = config.evaluation
    return [
        GenerateRequest(
            input_ids=tokens,
            sampling_seed=sampling_seed(evaluation.seed, SEED_TAG, prompt.prompt_id, index),
            max_new_tokens=config.rollout.max_response_tokens,
            temperature=evaluation.temperature,
        )
        for prompt, tokens in zip(prompts, prompt_tokens, strict=True)
        for index in range(evaluation.num_samples_per_prompt)
    ]


def summarize(responses: Sequence[GradedResponse]) -> dict[str, Any]:
    """Return the result of an evaluation.

    Args:
        responses: The k samples of each prompt side by side.

    Returns:
        pass_rate, pass_at_k, num_prompts, num_samples (per prompt, k), num_responses, reward_mean, lengths in
        tokens, truncated_fraction, and the first sample of the first prompts as examples.

    Example:
        Two prompts with rewards (1, 0) and (0, 0): pass_rate 0.25, pass_at_k 0.5.
    """
    passed = [response.reward >= PASSING_REWARD for response in responses]
    solved = {response.prompt.prompt_id for response, ok in zip(responses, passed, strict=True) if ok}
    prompt_ids = {response.prompt.prompt_id for response in responses}
    lengths = sorted(response.num_tokens for response in responses)
    firsts = [response for response in responses if response.sample_index == 0][:NUM_EXAMPLES]
    return {
        "pass_rate": sum(passed) / len(passed),
        "pass_at_k": len(solved) / len(prompt_ids),
        "num_prompts": len(prompt_ids),
        "num_samples": len(responses) // len(prompt_ids),
        "num_responses": len(responses),
        "reward_mean": sum(response.reward for response in responses) / len(responses),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_median": lengths[len(lengths) // 2],
        "response_tokens_max": lengths[-1],
        "truncated_fraction": sum(response.is_truncated for response in responses) / len(responses),
        "examples": [_example(response) for response in firsts],
    }


async def sample_responses(
    config: Config, client: EngineClient, requests: Sequence[GenerateRequest]
) -> list[GenerateResult]:
    """Return one result per request.

    A batch is as large as in training, and as many are in flight as the engines run at a time.
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


async def _sample(
    config: Config, engines: Sequence[EngineProcess], requests: Sequence[GenerateRequest]
) -> tuple[list[GenerateResult], float]:
    """Return one result per request, and the seconds that sampling took once the engines were ready."""
    urls, timeout = [engine.url for engine in engines], config.engine.request_timeout_seconds
    async with EngineClient(
        urls, engines[0].secret, timeout, vocab_size=config.model.architecture.vocab_size
    ) as client:
        await client.wait_ready(config.engine.start_timeout_seconds, lambda: check_all_alive(engines))
        started = time.perf_counter()
        results = await sample_responses(config, client, requests)
    return results, time.perf_counter() - started


def _grade(
    config: Config, tokenizer: ChatTokenizer, prompts: Sequence[Prompt], results: Sequence[GenerateResult]
) -> tuple[list[GradedResponse], int]:
    """Return the graded responses, and how many graders missed their deadline."""
    count = config.evaluation.num_samples_per_prompt
    asked = [prompts[place // count] for place in range(len(results))]
    texts = [tokenizer.decode(result.output_ids) for result in results]
    with GraderPool() as graders:
        answers = [
            Answer(
                text=text,
                label=prompt.label,
                prompt=prompt.messages,
                num_tokens=len(result.output_ids),
                is_truncated=result.finish_reason == "length",
            )
            for text, prompt, result in zip(texts, asked, results, strict=True)
        ]
        rewards, num_missed = asyncio.run(scores_of(graders, config.data.reward, answers))
    graded = [
        GradedResponse(
            prompt=asked[place],
            sample_index=place % count,
            text=texts[place],
            num_tokens=len(result.output_ids),
            is_truncated=result.finish_reason == "length",
            reward=rewards[place],
        )
        for place, result in enumerate(results)
    ]
    return graded, num_missed


def _example(response: GradedResponse) -> dict[str, Any]:
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in response.prompt.messages)
    return {
        "prompt": prompt,
        "response": response.text,
        "label": response.prompt.label,
        "reward": response.reward,
    }

"""Accuracy of a served model on held-out prompts.

The same prompts and the same seeds before and after training: sample k of a prompt has the same random
numbers in both, whatever the engines and the batches. `pass_rate` is the share of responses that pass, and
`pass_at_k` the share of prompts of which at least one of the k responses does. A response passes when its
first grader gives 1. One that could not be graded does not pass, and is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.reward_sum import has_passed
from posttrain.config.schema import Config
from posttrain.data.chat import ChatTokenizer
from posttrain.engines.client import EngineClient
from posttrain.engines.process import EngineProcess, check_all_alive, running_engines
from posttrain.engines.responses import GenerateRequest, GenerateResult
from posttrain.engines.sampling_seed import sampling_seed
from posttrain.observability.progress import ProgressBar
from posttrain.reward.graders import GraderPool
from posttrain.reward.scoring import Scored, Scorer, check_failures
from posttrain.rollout.answers import answer_of
from posttrain.types import Prompt

SEED_TAG = "heldout"
# As many as somebody reads in a report.
NUM_EXAMPLES = 24


@dataclass(frozen=True)
class GradedResponse:
    """One response to a held-out prompt.

    Args:
        prompt: What was asked.
        sample_index: 0 to k - 1.
        text: The response without its end token.
        num_tokens: Its length, the end token included.
        is_truncated: It was cut at the longest allowed length.
        scored: What the graders say.
    """

    prompt: Prompt
    sample_index: int
    text: str
    num_tokens: int
    is_truncated: bool
    scored: Scored

    @property
    def passes(self) -> bool:
        """See the head of this file."""
        return self.scored.reward is not None and has_passed(self.scored.scores, self.scored.reward)


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
        See `summarize`; and `tokens_per_second`, sampled tokens per second of sampling, the one key that differs from
        run to run.

    Raises:
        RuntimeError: When an engine does not start or fails.
    """
    with running_engines(config, checkpoint, log_folder) as engines:
        # The tokenizer is read while the engines load.
        tokenizer = ChatTokenizer(checkpoint, config.data.chat_template_kwargs)
        rendered = [tokenizer.render(prompt.messages, prompt.tools) for prompt in prompts]
        requests = make_requests(config, prompts, rendered)
        results, seconds = asyncio.run(_sample(config, engines, requests))
    graded = _grade(config, tokenizer, prompts, results)
    num_tokens = sum(response.num_tokens for response in graded)
    return {**summarize(graded), "tokens_per_second": num_tokens / seconds}


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
        pass_rate, pass_at_k, num_prompts, num_samples (per prompt, k), num_responses, num_ungraded (responses without
        a reward), reward_mean of the others, lengths in tokens, truncated_fraction; where there are several, the pass
        rate of each source (pass_rate_by_source) and the mean of each grader (scores); and the first sample of the
        first prompts as examples.

    Example:
        Two prompts with rewards (1, 0) and (0, 0): pass_rate 0.25, pass_at_k 0.5.
    """
    passed = [response.passes for response in responses]
    solved = {response.prompt.prompt_id for response, ok in zip(responses, passed, strict=True) if ok}
    prompt_ids = {response.prompt.prompt_id for response in responses}
    lengths = sorted(response.num_tokens for response in responses)
    rewards = [response.scored.reward for response in responses if response.scored.reward is not None]
    by_source: dict[str, list[bool]] = {}
    by_grader: dict[str, list[float]] = {}
    for response, ok in zip(responses, passed, strict=True):
        by_source.setdefault(response.prompt.source, []).append(ok)
        for name, score in response.scored.scores.items():
            by_grader.setdefault(name, []).extend([] if score is None else [score])
    firsts = [response for response in responses if response.sample_index == 0][:NUM_EXAMPLES]
    return {
        "pass_rate": sum(passed) / len(passed),
        "pass_at_k": len(solved) / len(prompt_ids),
        "num_prompts": len(prompt_ids),
        "num_samples": len(responses) // len(prompt_ids),
        "num_responses": len(responses),
        "num_ungraded": len(responses) - len(rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        **({"pass_rate_by_source": _means(by_source)} if len(by_source) > 1 else {}),
        **({"scores": _means(by_grader)} if len(by_grader) > 1 else {}),
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
) -> list[GradedResponse]:
    count = config.evaluation.num_samples_per_prompt
    asked = [prompts[place // count] for place in range(len(results))]
    answers = [answer_of(prompt, tokenizer, result) for prompt, result in zip(asked, results, strict=True)]
    with GraderPool.of(config) as graders:
        groups = [answers[start : start + count] for start in range(0, len(answers), count)]
        scored = [one for group in asyncio.run(Scorer(config, graders).score(groups)) for one in group]
    check_failures([one.failure for one in scored], config.reward.max_failure_share)
    return [
        GradedResponse(prompt, place % count, answer.text, answer.num_tokens, answer.is_truncated, scored[place])
        for place, (prompt, answer) in enumerate(zip(asked, answers, strict=True))
    ]


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(some) / len(some) for name, some in values.items() if some}


def _example(response: GradedResponse) -> dict[str, Any]:
    prompt = "\n".join(f"{message['role']}: {message.get('content', '')}" for message in response.prompt.messages)
    return {
        "prompt": prompt,
        "response": response.text,
        "label": response.prompt.label,
        "reward": response.scored.reward,
        **({"scores": dict(response.scored.scores)} if len(response.scored.scores) > 1 else {}),
        **({"failure": response.scored.failure} if response.scored.failure else {}),
    }

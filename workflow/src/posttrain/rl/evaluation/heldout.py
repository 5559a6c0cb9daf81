"""Accuracy of a served model on held-out prompts.

Prompts and seeds are the same before and after training: sample k of a prompt has the same random numbers in
both, with any engines and batches. `pass_rate` is the share of responses that pass, and `pass_at_k` the share
of prompts for which at least one of the k responses passes. A response passes if its first grader gives 1. A
response that could not be graded counts as not passed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from posttrain.config.reward_sum import has_passed
from posttrain.config.schema import Config
from posttrain.config.suites import eval_tasks_of
from posttrain.report.distributions import curve
from posttrain.report.intervals import wilson
from posttrain.report.metrics import EPISODE_NUMBERS
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import HELDOUT
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, client_of, engines_to_ask
from posttrain.rl.engines.verified_engines import verified_engines
from posttrain.rl.evaluation.sampling import sample_episodes
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer, check_failures
from posttrain.rl.rollout.episode import Episode
from posttrain.rl.rollout.response_text import answer_of
from posttrain.types import Prompt

# A task's episodes, and the seconds of sampling.
Sampled = tuple[list[Episode], float]
Then = Callable[[EngineEndpoints, Sequence[Sampled]], Awaitable[None]]
# Examples in a report.
NUM_EXAMPLES = 24


@dataclass(frozen=True)
class GradedResponse:
    """One graded response to a held-out prompt.

    Args:
        prompt: The prompt.
        sample_index: 0 to k - 1.
        text: The response without its end token.
        num_tokens: Its length, including the end token.
        is_truncated: It reached the length limit.
        scored: The graders' results.
        parts: Numbers of an episode in an environment, by metric.
        transcript: Texts of an episode after its first prompt, each with whether the model wrote it.
    """

    prompt: Prompt
    sample_index: int
    text: str
    num_tokens: int
    is_truncated: bool
    scored: Scored
    parts: Mapping[str, float] = field(default_factory=dict)
    transcript: Sequence[tuple[str, bool]] = ()

    @property
    def passes(self) -> bool:
        """Whether the response passes; see the module docstring."""
        return self.scored.reward is not None and has_passed(self.scored.scores, self.scored.reward)


@dataclass(frozen=True)
class EvalTask:
    """An evaluation task: prompts, and how to sample and grade them.

    Args:
        name: Name of the suite; `HELD_OUT` for the held-out prompts.
        config: The task's configuration (`config.suites.eval_tasks_of`); `evaluation`, `engine`,
            `rollout.max_response_tokens` and `data.reward` apply.
        prompts: In file order.
    """

    name: str
    config: Config
    prompts: Sequence[Prompt]


def read_eval_tasks(config: Config, folders: Mapping[str, Path]) -> list[EvalTask]:
    """Return a run's evaluation tasks, with the held-out prompts first.

    Args:
        config: The resolved configuration.
        folders: Task name -> folder with its `heldout.jsonl`.
    """
    return [
        EvalTask(name, of_exam, load_prompts(folders[name] / HELDOUT))
        for name, of_exam in eval_tasks_of(config).items()
    ]


def read_suites(config: Config, folders: Mapping[str, Path]) -> list[EvalTask]:
    """Return a run's evaluation tasks without the held-out prompts."""
    eval_tasks = eval_tasks_of(config)
    return [EvalTask(name, eval_tasks[name], load_prompts(folder / HELDOUT)) for name, folder in folders.items()]


def evaluate_checkpoint(
    config: Config, checkpoint: Path, eval_tasks: Sequence[EvalTask], log_folder: Path
) -> dict[str, dict[str, Any]]:
    """Serve a checkpoint, verify the engines, sample every prompt k times, grade, and summarise.

    Args:
        config: The engines' configuration (`serving_config`).
        checkpoint: In Hub layout, BF16 or FP8, with tokenizer and chat template.
        eval_tasks: The tasks.
        log_folder: Folder for the engines' logs.

    Returns:
        Task name -> summary, see `summarize`; each with `tokens_per_second`, the sampling throughput, the only key
        that differs from run to run.

    Raises:
        ConfigError: An engine serves other weights than those trained.
        RuntimeError: An engine does not start or fails.
    """
    answered = answer_eval_tasks(config, checkpoint, eval_tasks, log_folder, is_held=True)
    return {
        name: {**summarize(one.graded), "tokens_per_second": one.tokens_per_second} for name, one in answered.items()
    }


@dataclass(frozen=True)
class Answered:
    """A completed task: an episode and a graded response for each sample.

    Args:
        episodes: What was sampled.
        graded: The graded responses.
        seconds: Sampling time once engines were ready.
    """

    episodes: Sequence[Episode]
    graded: Sequence[GradedResponse]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of sampling."""
        return sum(response.num_tokens for response in self.graded) / self.seconds


def answer_eval_tasks(
    config: Config,
    checkpoint: Path,
    eval_tasks: Sequence[EvalTask],
    log_folder: Path,
    is_held: bool = False,
    then: Then | None = None,
) -> dict[str, Answered]:
    """Serve a checkpoint, sample and grade; returns task name -> answers; see `evaluate_checkpoint`.

    Args:
        config: See `evaluate_checkpoint`.
        checkpoint: See `evaluate_checkpoint`.
        eval_tasks: See `evaluate_checkpoint`.
        log_folder: See `evaluate_checkpoint`.
        is_held: Verify the engines first; off for measuring the loss of a precision.
        then: Called with the client after sampling, for further requests.
    """
    # Turns are requested one by one.
    with engines_to_ask(config, checkpoint, log_folder, merge_requests=bool(config.data.environment)) as engines:
        # Load the tokenizer while the engines load.
        tokenizer = ChatTokenizer(checkpoint, config.data.chat_template_kwargs)
        ready = verified_engines(config, engines, checkpoint) if is_held else client_of(config, engines)
        sampled = asyncio.run(_sample_all(ready, engines, tokenizer, eval_tasks, then))
    found = {}
    with GraderPool.of(config) as graders:
        for eval_task, (episodes, seconds) in zip(eval_tasks, sampled, strict=True):
            graded = asyncio.run(grade_episodes(eval_task, tokenizer, graders, episodes))
            found[eval_task.name] = Answered(episodes, graded, seconds)
    return found


def summarize(responses: Sequence[GradedResponse]) -> dict[str, Any]:
    """Return the result of an evaluation.

    Args:
        responses: The k samples of each prompt, consecutive.

    Returns:
        pass_rate, pass_at_k, pass_at and pass_all (see there), num_prompts, num_samples (per prompt, k), num_responses,
        num_ungraded (responses without a reward), reward_mean of the others, has_partial_credit (some reward is not
        simply 1 for a pass and 0 otherwise), lengths in tokens, truncated_fraction; if there are several, the pass rate
        of each source (pass_rate_by_source) and the mean of each grader (scores); episodes (means of their numbers,
        their `curves` of `report.distributions`, by_turns), if there are any; by_prompt (id, pass rate and mean reward,
        None without a graded response); and the first sample of the first prompts as examples.

    Example:
        Two prompts with rewards (1, 0) and (0, 0): pass_rate 0.25, pass_at_k 0.5.
    """
    passed = [response.passes for response in responses]
    lengths = sorted(response.num_tokens for response in responses)
    rewards = _rewards(responses)
    by_source: dict[str, list[bool]] = {}
    by_grader: dict[str, list[float]] = {}
    for response, ok in zip(responses, passed, strict=True):
        by_source.setdefault(response.prompt.source, []).append(ok)
        for name, score in response.scored.scores.items():
            by_grader.setdefault(name, []).extend([] if score is None else [score])
    by_prompt: dict[int, list[GradedResponse]] = {}
    for response in responses:
        by_prompt.setdefault(response.prompt.prompt_id, []).append(response)
    firsts = [response for response in responses if response.sample_index == 0][:NUM_EXAMPLES]
    return {
        "pass_rate": sum(passed) / len(passed),
        "pass_at_k": sum(any(one.passes for one in samples) for samples in by_prompt.values()) / len(by_prompt),
        "pass_at": pass_at(passed, len(responses) // len(by_prompt)),
        "pass_all": pass_all(passed, len(responses) // len(by_prompt)),
        "num_prompts": len(by_prompt),
        "num_samples": len(responses) // len(by_prompt),
        "num_responses": len(responses),
        "num_ungraded": len(responses) - len(rewards),
        "reward_mean": _mean(rewards),
        "has_partial_credit": any(one.scored.reward not in (None, float(one.passes)) for one in responses),
        **({"pass_rate_by_source": _means(by_source)} if len(by_source) > 1 else {}),
        **({"scores": _means(by_grader)} if len(by_grader) > 1 else {}),
        **_of_episodes(responses),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_median": lengths[len(lengths) // 2],
        "response_tokens_max": lengths[-1],
        "truncated_fraction": sum(response.is_truncated for response in responses) / len(responses),
        "by_prompt": [
            [prompt_id, _mean([float(one.passes) for one in samples]), _mean(_rewards(samples))]
            for prompt_id, samples in by_prompt.items()
        ],
        "examples": [_example(response) for response in firsts],
    }


def pass_at(passed: Sequence[bool], num_samples: int) -> dict[str, list[float]]:
    """Return k -> pass@k and the bounds of its 95 % interval, for k = 1, 2, 4, ..., n: one of k responses passes.

    The estimate is unbiased (Chen et al., arXiv:2107.03374, equation 1). The interval is Wilson's with one trial per
    prompt, which is conservative: values between 0 and 1 vary less than binary ones.

    Args:
        passed: Whether each response passes; those of a prompt are consecutive.
        num_samples: n, samples per prompt.

    Example:
        Two prompts of two responses, of which one passes: k = 1 gives 0.25, k = 2 gives 0.5.
    """
    return _over_choices(
        passed, num_samples, lambda count, k: 1 - math.comb(num_samples - count, k) / math.comb(num_samples, k)
    )


def pass_all(passed: Sequence[bool], num_samples: int) -> dict[str, list[float]]:
    """Return k -> pass^k and its bounds, as `pass_at`: all of k responses pass (Yao et al., arXiv:2406.12045).

    Example:
        Two prompts of two responses, of which three pass: k = 1 gives 0.75, k = 2 gives 0.5.
    """
    return _over_choices(passed, num_samples, lambda count, k: math.comb(count, k) / math.comb(num_samples, k))


def _over_choices(
    passed: Sequence[bool], num_samples: int, rate: Callable[[int, int], float]
) -> dict[str, list[float]]:
    """Return the mean over prompts of `rate`, from the number of passing responses and k, with its interval."""
    solved = [sum(passed[start : start + num_samples]) for start in range(0, len(passed), num_samples)]
    powers = (2**exponent for exponent in range(num_samples.bit_length()))
    return {
        str(k): [*wilson(math.fsum(rate(count, k) for count in solved) / len(solved), len(solved))]
        for k in sorted({*powers, num_samples})
    }


async def _sample_all(
    ready: AbstractAsyncContextManager[EngineClient],
    engines: EngineEndpoints,
    tokenizer: ChatTokenizer,
    eval_tasks: Sequence[EvalTask],
    then: Then | None,
) -> list[Sampled]:
    """Return each task's episodes, and the seconds of sampling."""
    sampled: list[Sampled] = []
    async with ready as client:
        for eval_task in eval_tasks:
            started = time.perf_counter()
            episodes = await sample_episodes(eval_task.config, eval_task.name, eval_task.prompts, client, tokenizer)
            sampled.append((episodes, time.perf_counter() - started))
        if then:
            await then(engines, sampled)
    return sampled


async def grade_episodes(
    eval_task: EvalTask, tokenizer: ChatTokenizer, graders: GraderPool, episodes: Sequence[Episode]
) -> list[GradedResponse]:
    """Grade each episode of a task.

    Raises:
        RuntimeError: Graders failed too often.
    """
    config, count = eval_task.config, eval_task.config.evaluation.num_samples_per_prompt
    asked = [eval_task.prompts[place // count] for place in range(len(episodes))]
    answers = [answer_of(prompt, tokenizer, episode) for prompt, episode in zip(asked, episodes, strict=True)]
    groups = [answers[start : start + count] for start in range(0, len(answers), count)]
    scored = [one for group in await Scorer(config, graders).score(groups) for one in group]
    check_failures([one.failure for one in scored], config.reward.max_failure_share)
    return [
        GradedResponse(
            asked[place],
            place % count,
            answer.text,
            answer.num_tokens,
            answer.is_truncated,
            scored[place],
            episodes[place].parts,
            transcript_of(tokenizer, episodes[place]) if episodes[place].grade else (),
        )
        for place, answer in enumerate(answers)
    ]


def _of_episodes(responses: Sequence[GradedResponse]) -> dict[str, Any]:
    """Return means and distributions of the episodes' numbers; empty without an environment."""
    known = [response.parts for response in responses if response.parts]
    if not known:
        return {}
    turns = Counter(str(int(parts["episode/turns"])) for parts in known)
    means = {name.rpartition("/")[2]: sum(parts[name] for parts in known) / len(known) for name in known[0]}
    curves = {name.rpartition("/")[2]: curve([parts[name] for parts in known]) for name in EPISODE_NUMBERS}
    by_turns = dict(sorted(turns.items(), key=lambda item: int(item[0])))
    return {"episodes": {**means, "curves": curves, "by_turns": by_turns}}


def transcript_of(tokenizer: ChatTokenizer, episode: Episode) -> list[tuple[str, bool]]:
    """Return the texts of an episode after its first prompt, each with whether the model wrote it."""
    tokens = iter(episode.tokens)
    stretches = [(bool(mark), [*islice(tokens, len([*some]))]) for mark, some in groupby(episode.loss_mask)]
    return [(tokenizer.text_of(some), is_written) for is_written, some in stretches[1:]]


def _rewards(responses: Sequence[GradedResponse]) -> list[float]:
    return [response.scored.reward for response in responses if response.scored.reward is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
        **({"transcript": [*map(list, response.transcript)]} if response.transcript else {}),
    }

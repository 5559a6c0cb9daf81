"""Duration of a step's rollout, and of an evaluation, which is a rollout of other prompts.

Sources: `decoding` for one engine; a response's mean length and a prompt's length are assumed, see `rates`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from posttrain.config.derived import prefill_gpus, rollout_samples_per_step, uses_engines
from posttrain.config.schema import Config
from posttrain.config.suites import eval_tasks_of
from posttrain.plan.flags.sglang_flags import has_dp_attention
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.timing.decoding import DecodingGpus, RolloutTime, rollout_time
from posttrain.plan.timing.rates import MEAN_RESPONSE_SHARE, PROMPT_TOKENS


@dataclass(frozen=True)
class Workload:
    """The tokens of a training step.

    Args:
        num_samples: Samples per step.
        prompt_tokens: Tokens of a prompt.
        longest_response: Tokens of the longest response.
        mean_share: Mean length of a response as a share of the longest.
    """

    num_samples: int
    prompt_tokens: float
    longest_response: float
    mean_share: float

    @property
    def mean_tokens(self) -> float:
        """Tokens of an average sample."""
        return self.prompt_tokens + self.mean_share * self.longest_response


def workload(config: Config) -> Workload:
    """Return the tokens of a configuration's step; the mean length is an assumption, see `rates`."""
    return Workload(
        rollout_samples_per_step(config), PROMPT_TOKENS, config.rollout.max_response_tokens, MEAN_RESPONSE_SHARE
    )


def engine_of(config: Config, num_engines: int | None = None) -> DecodingGpus:
    """Return an engine of a configuration; the decoding one if prefill is separate.

    Args:
        config: The resolved configuration.
        num_engines: Number of engines that share the prefill engines; by default the configuration's.
    """
    full = "fp32" if config.engine.dtype == "float32" else "bf16"
    return DecodingGpus(
        arch=config.model.architecture,
        hardware=config.hardware,
        num_gpus=config.engine.gpus_per_engine,
        stored="fp8" if config.rollout.fp8 else full,
        dp_attention=has_dp_attention(config),
        prefill_gpus=prefill_gpus(config) / (num_engines or config.engine.num_engines) or None,
        num_drafts=config.engine.mtp_steps,
    )


def rollout_of(engine: DecodingGpus, num_engines: float, work: Workload) -> RolloutTime:
    """Return the duration of a step's samples on equal engines."""
    requests = work.num_samples / num_engines
    return rollout_time(engine, requests, work.prompt_tokens, work.longest_response, work.mean_share)


def rollout_of_step(config: Config, work: Workload) -> RolloutTime:
    """Return the duration of a step's rollout; 0 for given responses."""
    if not uses_engines(config):
        return RolloutTime(0.0, 1.0)
    # Requests that wait for states begin in waves.
    most = engine_memory(config).max_requests
    waves = max(work.num_samples / config.engine.num_engines / max(most, 1), 1.0) if most is not None else 1.0
    at_once = replace(work, num_samples=math.ceil(work.num_samples / waves))
    time = rollout_of(engine_of(config), config.engine.num_engines, at_once)
    return replace(time, seconds=time.seconds * waves)


def running_requests(config: Config) -> int:
    """Return the requests that an engine runs at once: at most those for whose states there is memory."""
    most = engine_memory(config).max_requests
    return config.engine.max_running_requests if most is None else min(most, config.engine.max_running_requests)


def evaluation_seconds(config: Config) -> float:
    """Return the time in which a configuration's engines answer the held-out prompts and the suites, one after another.

    A suite without a number of prompts counts as 0.
    """
    total = 0.0
    for name, eval_task in eval_tasks_of(config).items():
        suite = config.evaluation.suites.get(name)
        prompts = suite.num_prompts if suite else eval_task.data.num_heldout_prompts
        samples = prompts * eval_task.evaluation.num_samples_per_prompt
        if samples:
            work = Workload(samples, PROMPT_TOKENS, eval_task.rollout.max_response_tokens, MEAN_RESPONSE_SHARE)
            total += rollout_of(engine_of(config), config.engine.num_engines, work).seconds
    return total


def evaluation_share(step_seconds: float, seconds: float, interval: int) -> float:
    """Return the share of training's time, and of its GPU-hours, for evaluations between steps.

    Args:
        step_seconds: Duration of a step.
        seconds: Duration of an evaluation.
        interval: Steps between two evaluations.

    Example:
        300 s after each 10 steps of 600 s: 300 / 6300 = 0.048.
    """
    return seconds / (interval * step_seconds + seconds)


def evaluation_interval(step_seconds: float, seconds: float, max_share: float) -> int:
    """Return the smallest interval at which evaluations take at most `max_share` of training's time."""
    return max(math.ceil(seconds * (1 - max_share) / (max_share * step_seconds)), 1)

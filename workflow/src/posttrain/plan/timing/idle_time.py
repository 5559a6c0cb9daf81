"""GPU-seconds of a step in which a GPU waits, by cause, over all GPUs of the job.

    longest sample       GPUs that decode, for the share of requests that have ended before the longest response
    prefill engines      while the others decode
    waiting for prefill  engines that only decode, until all prompts are prefilled
    without an engine    GPUs that only train, during the rollout
    engines' own nodes   during log-probabilities and training
    pipeline             stages that fill and drain, in training and in the pass for old log-probabilities
    checkpoint           all GPUs, where a checkpoint takes longer than the rollout that it is written beside

Not counted: ranks that wait for the busiest rank's experts or for a longer stage, and transfers of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.derived import engine_gpus, prefill_gpus, uses_engines, world_size
from posttrain.config.schema import Config
from posttrain.plan.timing.decoding import RolloutTime

NOTES = {
    "longest sample": "responses that have ended wait for it",
    "prefill engines": "they wait while the others decode",
    "waiting for prefill": "engines that decode wait for all prompts",
    "without an engine": "GPUs that only train wait for the rollout",
    "engines' own nodes": "they wait while the trainer works",
    "pipeline": "stages that wait while it fills and drains",
    "checkpoint": "it takes longer than the rollout beside it",
}


@dataclass(frozen=True)
class StepTimes:
    """The parts of a step in which GPUs may wait.

    Args:
        rollout: The rollout.
        training: Seconds of old log-probabilities and training.
        pipeline_idle: Seconds of these in which a stage waits.
        checkpoint_wait: Seconds per step in which all wait for a checkpoint.
    """

    rollout: RolloutTime
    training: float
    pipeline_idle: float
    checkpoint_wait: float


def job_gpus(config: Config) -> int:
    """Return the GPUs of a training job, spare nodes apart."""
    return config.nodes * config.hardware.gpus_per_node


def idle_gpu_seconds(config: Config, times: StepTimes) -> dict[str, float]:
    """Return cause -> GPU-seconds of a step in which GPUs wait; causes that take none are left out.

    Args:
        config: The resolved configuration.
        times: Seconds of the step.

    Example:
        128 GPUs of which 64 prefill for 10 s and 64 decode for 90 s, on average for 75 % of the requests: 64 x 90 x
        0.25 wait for the longest sample, 64 x 90 of the prefill engines and 64 x 10 for prefill: 7,840 of 12,800.
    """
    has_engines, gpus = uses_engines(config), job_gpus(config)
    prefilling = prefill_gpus(config) if has_engines else 0
    decoding = engine_gpus(config) - prefilling if has_engines else 0
    rollout = times.rollout
    generating = rollout.seconds - rollout.prefill_seconds
    seconds = {
        "longest sample": decoding * generating * (1 - rollout.busy_share),
        "prefill engines": prefilling * generating,
        "waiting for prefill": decoding * rollout.prefill_seconds if prefilling else 0.0,
        "without an engine": (gpus - decoding - prefilling) * rollout.seconds,
        "engines' own nodes": (gpus - world_size(config)) * times.training,
        "pipeline": world_size(config) * times.pipeline_idle,
        "checkpoint": gpus * times.checkpoint_wait,
    }
    return {cause: value for cause, value in seconds.items() if value}

"""Idle GPU-seconds of a step, by cause, over all GPUs of the job.

    longest sample       decoding GPUs, for the share of requests that have ended before the longest response
    prefill engines      while the others decode
    waiting for prefill  engines that only decode, until all prompts are prefilled
    without an engine    GPUs that only train, during the rollout
    engines' own nodes   during log-probabilities and training
    pipeline             stages that fill and drain, in training and in the pass for old log-probabilities
    checkpoint           all GPUs, if a checkpoint takes longer than the rollout that overlaps it

If engines run ahead, these replace the first five:

    groups not ready     GPUs that train, until a step has its groups
    free places          engines, for the share of the tokens that they could generate with all places taken

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
    "groups not ready": "the trainer waits for them",
    "free places": "engines could generate more at a time",
    "pipeline": "stages that wait while it fills and drains",
    "checkpoint": "it takes longer than the rollout beside it",
}


@dataclass(frozen=True)
class StepTimes:
    """Durations of a step's parts in which GPUs may wait.

    Args:
        rollout: Duration of the rollout.
        training: Seconds of old log-probabilities and training.
        pipeline_idle: The part of `training` in which a stage waits.
        checkpoint_wait: Seconds per step in which all GPUs wait for a checkpoint.
    """

    rollout: RolloutTime
    training: float
    pipeline_idle: float
    checkpoint_wait: float


def job_gpus(config: Config) -> int:
    """Return the number of GPUs of a training job, without spare nodes."""
    return config.nodes * config.hardware.gpus_per_node


def idle_gpu_seconds(config: Config, times: StepTimes) -> dict[str, float]:
    """Return cause -> idle GPU-seconds of a step; causes without any are omitted.

    Args:
        config: The resolved configuration.
        times: Seconds of the step.

    Example:
        128 GPUs, of which 64 prefill for 10 s and 64 decode for 90 s, on average for 75 % of the requests: 64 x 90 x
        0.25 for the longest sample, 64 x 90 for the prefill engines and 64 x 10 for prefill: 7,840 of 12,800.
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


@dataclass(frozen=True)
class AheadTimes:
    """Durations of a step's parts in which GPUs may wait, where engines run ahead.

    Args:
        trainer: Seconds in which the trainer waits for groups.
        engines: Seconds of a step that engines with all places taken would not need.
        pipeline_idle: Seconds in which a stage waits.
        checkpoint_wait: Seconds per step in which the trainer waits for a checkpoint.
    """

    trainer: float
    engines: float
    pipeline_idle: float
    checkpoint_wait: float


def idle_gpu_seconds_ahead(config: Config, times: AheadTimes) -> dict[str, float]:
    """Return cause -> idle GPU-seconds of a step with engines that run ahead; causes without any are omitted."""
    ranks = world_size(config)
    seconds = {
        "groups not ready": ranks * times.trainer,
        "free places": (job_gpus(config) - ranks) * times.engines,
        "pipeline": ranks * times.pipeline_idle,
        "checkpoint": job_gpus(config) * times.checkpoint_wait,
    }
    return {cause: value for cause, value in seconds.items() if value}

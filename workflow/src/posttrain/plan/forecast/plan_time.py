"""The plan's time table: a training step by phase, what of it is waiting, and why there may be no split of the nodes.

The seconds come from `step_time`; here they are put in order and explained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.derived import prefill_gpus, runs_ahead, uses_engines
from posttrain.config.schema import Config
from posttrain.plan.timing.idle_time import NOTES, job_gpus
from posttrain.plan.timing.rates import TOLERANCE
from posttrain.plan.timing.rollout_of_step import (
    Workload,
    evaluation_share,
    workload,
)
from posttrain.plan.timing.step_time import (
    IN_EVERY_STEP,
    idle_of_step,
    update_causes,
    update_mfu,
)
from posttrain.readable import format_percent


def step_part(config: Config, seconds: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the time table of a step as it stands in `plan.json`; None for a machine without GPUs.

    Args:
        config: The resolved configuration.
        seconds: `durations_seconds` of it.

    Returns:
        "seconds" of a step, "tolerance" of the model, and "phases": rows with "phase", "once" (seconds each time it
        happens), "per_step" (seconds; None for what is not part of a step), "share" of the step and "note". The rows
        of the step add up to it; "waiting" has rows that are part of those, averaged over all GPUs of the job, with
        "gpu_seconds", and "idle_share" is their sum as a share of the job's GPU time. "causes" tells what training's
        seconds are spent on, the longest first, with "share" of training, and "mfu" which share of the GPUs' peak it
        reaches.
    """
    if "step" not in seconds:
        return None
    work, step = workload(config), seconds["step"]
    notes = _notes(config, work)
    every = {name: seconds[f"step_{name}"] for name in IN_EVERY_STEP}
    rows = [_row(name, once, once, step, notes[name]) for name, once in every.items()]
    # Seconds are rounded, and a rest of zero shall not be less; the same below.
    wait = max(step - sum(every.values()), 0.0)
    rows.append(_row("save", seconds["step_save"], wait, step, notes["save"]))
    # There is none of a model that one node does not hold.
    if (evaluation := seconds.get("evaluate before")) is not None:
        rows.append(_row("evaluation", evaluation, None, step, notes["evaluation"]))
    if (measured := seconds.get("step_evaluation")) is not None:
        share = evaluation_share(step, measured, config.evaluation.interval)
        rows.append(_row("evaluation between steps", measured, None, step, f"{notes['between']}: {share:.1%}"))
    idle, gpus = idle_of_step(config, seconds["step_rollout"], wait), job_gpus(config)
    return {
        "seconds": step,
        "phases": rows,
        "waiting": [_idle_row(cause, gpu_seconds, gpus, step) for cause, gpu_seconds in idle.items()],
        "idle_share": round(sum(idle.values()) / (gpus * step), 4),
        "tolerance": TOLERANCE,
        "mfu": round(update_mfu(config), 4),
        "causes": _causes(update_causes(config)),
    }


def _idle_row(cause: str, gpu_seconds: float, gpus: int, step: float) -> dict[str, Any]:
    mean = gpu_seconds / gpus
    row = _row(f"idle: {cause}", mean, mean, step, f"{NOTES[cause]}: {gpu_seconds:,.0f} GPU-seconds")
    return row | {"gpu_seconds": round(gpu_seconds, 1)}


def _causes(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(seconds.values())
    return [
        {"cause": cause, "seconds": round(value, 3), "share": round(value / total, 4)}
        for cause, value in seconds.items()
    ]


def why_no_step(config: Config) -> str | None:
    """Return why a step has no time table; None where it has one."""
    if config.hardware.device != "cpu":
        return None
    return (
        "without GPUs trainer and engines share the cores, and the small tensors of a model that fits are bound by "
        "calls, not by the rates of the machine: no published measurement tells how long these take"
    )


def why_no_split(config: Config, split: Mapping[str, float] | None) -> str | None:
    """Return why trainer and engines cannot have nodes of their own; None where a split is planned.

    Args:
        config: The resolved configuration.
        split: `split_part` of it.
    """
    if config.hardware.device == "cpu":
        return "no step time is planned without GPUs"
    if not uses_engines(config):
        return "responses are given, so that there are no engines"
    if split is not None:
        return None
    if config.nodes == 1:
        return "one node cannot be split"
    gpus, prefill = config.engine.gpus_per_engine, prefill_gpus(config)
    engine = f"an engine of {gpus} GPUs" + (f", with {prefill} that prefill for it," if prefill else "")
    left = config.nodes - -(-(gpus + prefill) // config.hardware.gpus_per_node)
    if left < 1:
        return f"{engine} leaves no node for the trainer"
    return (
        f"{engine} leaves {left} of {config.nodes} nodes, on whose GPUs the trainer's weights, gradients and optimizer "
        "state do not fit"
    )


def _notes(config: Config, work: Workload) -> dict[str, str]:
    every = config.trainer.save_interval
    share, prefill = f"mean length assumed at {work.mean_share:.0%} of it", prefill_gpus(config)
    if prefill:
        share += f"; {prefill} GPUs prefill, then the others decode"
    rollout = f"{work.num_samples} samples, until the longest of {work.longest_response:,} tokens ends; {share}"
    if config.rollout.tail_fraction:
        groups, share = config.rollout.rollout_batch_size, format_percent(config.rollout.tail_fraction, 0)
        rollout = f"until {groups} groups are ready; at most {share} more are left to the next step"
    if runs_ahead(config):
        rollout = f"the trainer waits for groups, sampled at most {config.rollout.max_staleness} updates ago"
    beside = "during the next wait for groups" if runs_ahead(config) else "during the next rollout"
    return {
        "rollout": rollout,
        "old_logprobs": "a forward pass over the samples of all updates but the first",
        "train": "forward, backward, recomputation, pipeline idle and the optimizer",
        "weight_sync": "new weights to all engines",
        "save": f"{beside}, {'after each step' if every == 1 else f'every {every} steps'}",
        "evaluation": "before and after the run, not in a step",
        "between": f"every {config.evaluation.interval} steps on training's engines; share of training's GPU-hours",
    }


def _row(phase: str, once: float, per_step: float | None, step: float, note: str) -> dict[str, Any]:
    rounded = None if per_step is None else round(per_step, 3)
    share = None if per_step is None else round(per_step / step, 4)
    return {"phase": phase, "once": round(once, 3), "per_step": rounded, "share": share, "note": note}

"""Memory of a calibration: forward passes in training's layout, without gradients, optimizer or engines."""

from __future__ import annotations

from dataclasses import replace

from posttrain.config.derived import calibrating, calibration_passes
from posttrain.config.schema import Config
from posttrain.plan.sizing.memory_phases import phase_memory

# Parts of a rank's training memory that a forward pass does not need.
_OF_TRAINING = ("gradients", "optimizer", "engine_weights", "kv_pool", "engine_work", "engine_routes", "sent_weights")


def calibration_gib(config: Config) -> float:
    """Return the memory of the fullest rank, in GiB.

    Example:
        GLM-5 on 16 nodes of 8 H200: the same as a pass for old log-probabilities.
    """
    ranks = calibrating(config)
    # No engine shares the GPU, as with engines on their own nodes.
    alone = replace(ranks, engine=replace(ranks.engine, sleep="auto"))
    passes = [item for item in phase_memory(alone) if item.phase == "old_logprobs"]
    return max(sum(gib for part, gib in item.gpu.items() if part not in _OF_TRAINING) for item in passes)


def describe_calibration(config: Config) -> str:
    """Describe the calibration data and the memory of a rank."""
    return f"{conversations(config) or 'no'} conversations, {calibration_gib(config):.1f} GiB per rank"


def conversations(config: Config) -> str:
    """Describe the samples: "512 coding + 512 broad"."""
    return " + ".join(f"{wanted.num_samples} {name}" for name, wanted in calibration_passes(config).items())

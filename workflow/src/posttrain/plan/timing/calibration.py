"""Duration of a calibration: it reads the weights, then runs forward passes over conversations, shard by shard."""

from __future__ import annotations

import dataclasses
import math

from posttrain.config.derived import calibrating, calibration_passes, token_budget
from posttrain.config.schema import Config
from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing.step_time import trainer_of
from posttrain.plan.timing.update_time import forward_causes


def calibration_seconds(config: Config, shared_storage: float) -> float:
    """Return the maximum duration, with every conversation at its pass's length limit; 0 without GPUs or experts.

    Args:
        config: The resolved configuration.
        shared_storage: Bytes per second of shared storage, which holds the weights.
    """
    arch, passes = config.model.architecture, calibration_passes(config)
    if config.hardware.device == "cpu" or not arch.n_routed_experts or not passes:
        return 0.0
    ranks, size = calibrating(config), config.serving.samples_per_shard
    trainer = dataclasses.replace(trainer_of(ranks), num_updates=1)
    total = storage(config).torch_dist / shared_storage
    for wanted in passes.values():
        tokens = min(wanted.max_tokens, arch.max_position_embeddings)
        # Short sequences attend to all keys, without a sparse kernel.
        kernel = trainer.kernel if tokens > arch.index_topk else None
        for samples in _shards(wanted.num_samples, size):
            rows = math.ceil(samples * tokens / trainer.data / token_budget(ranks))
            of_shard = dataclasses.replace(trainer, kernel=kernel, num_micro_batches=max(rows, 1))
            total += sum(forward_causes(of_shard, samples, tokens).values())
    return total


def _shards(num_samples: int, size: int) -> list[int]:
    whole, rest = divmod(num_samples, size)
    return [size] * whole + [rest] * bool(rest)

"""From the graded groups of a rollout to the packed micro-batches of each optimizer update.

Every rank computes the same plan from the same groups, and builds the micro-batches of its own data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from posttrain.algorithm.advantage import group_advantages
from posttrain.algorithm.aggregation import token_weights
from posttrain.batching.packed_batch import PackedBatch, build_packed_batch
from posttrain.batching.packing import pack
from posttrain.config.derived import data_parallel_size
from posttrain.config.schema import Config
from posttrain.megatron_backend.train_step import TrainingMicroBatch
from posttrain.types import Sample, SampleGroup


@dataclass(frozen=True)
class Update:
    """One optimizer update as one data-parallel rank sees it.

    Args:
        samples: The whole global batch, in rollout order.
        batches: This rank's micro-batches; their sample indices count in `samples`.
        num_micro_batches: Of all data-parallel ranks together.
        advantages: [len(samples)] fp32.
        weights: [len(samples)] fp32, the weight of each response token of a sample in the loss.
        old_logprobs: [T] per micro-batch on ranks that see log-probabilities; empty before they are computed.
    """

    samples: tuple[Sample, ...]
    batches: tuple[PackedBatch, ...]
    num_micro_batches: int
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: tuple[torch.Tensor, ...] = ()

    def with_old_logprobs(self, old_logprobs: Sequence[torch.Tensor]) -> Update:
        """Return the update with the log-probabilities before it."""
        return replace(self, old_logprobs=tuple(old_logprobs))

    def micro_batches(self) -> list[TrainingMicroBatch]:
        """Return what the trainer's schedule consumes."""
        old = self.old_logprobs or (None,) * len(self.batches)
        return [
            TrainingMicroBatch(batch, batch.spread(self.advantages), batch.spread(self.weights), logprobs)
            for batch, logprobs in zip(self.batches, old, strict=True)
        ]


def make_updates(config: Config, groups: Sequence[SampleGroup], dp_rank: int) -> list[Update]:
    """Cut a rollout into optimizer updates and pack each for one data-parallel rank.

    Args:
        config: The resolved configuration.
        groups: The rollout, in prompt order.
        dp_rank: The rank that the micro-batches are for.
    """
    advantages = group_advantages(groups, config.algorithm.normalize_by_std).flatten()
    samples = [sample for group in groups for sample in group.samples]
    size = config.training.global_batch_size
    return [
        _make_update(config, samples[start : start + size], advantages[start : start + size], dp_rank)
        for start in range(0, len(samples), size)
    ]


def _make_update(config: Config, samples: list[Sample], advantages: torch.Tensor, dp_rank: int) -> Update:
    parallel = config.parallel
    budget = config.trainer.max_tokens_per_gpu * parallel.context_parallel_size
    # Sequence parallelism splits a row over TP ranks; two chunks per rank balance causal context parallelism.
    multiple = parallel.tensor_model_parallel_size
    if parallel.context_parallel_size > 1:
        multiple *= 2 * parallel.context_parallel_size
    # Rounded down, so that a padded row keeps the budget too.
    plan = pack([s.num_tokens for s in samples], budget // multiple * multiple, data_parallel_size(config))
    return Update(
        samples=tuple(samples),
        batches=tuple(build_packed_batch(samples, indices, multiple) for indices in plan[dp_rank]),
        num_micro_batches=sum(len(batches) for batches in plan),
        advantages=advantages,
        weights=token_weights(
            [len(sample.response_tokens) for sample in samples],
            config.algorithm.loss_aggregation,
            config.rollout.max_response_tokens,
        ),
    )

"""Turns the graded groups of a rollout into the packed micro-batches of each optimizer update.

Every rank computes the same plan from the same groups, and builds the micro-batches of its own data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from posttrain.config.derived import data_parallel_size, micro_batch_multiple, token_budget
from posttrain.config.schema import Config
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.rl.algorithm.objective import Needs, Objective, TokenBatch
from posttrain.rl.algorithm.settings import Algorithm
from posttrain.rl.batching.packed_batch import PackedBatch, build_packed_batch
from posttrain.rl.batching.packing import pack
from posttrain.rl.megatron_backend.train_step import TrainingMicroBatch
from posttrain.types import Trajectory, TrajectoryGroup, VersionSpan


@dataclass(frozen=True)
class Update:
    """One optimizer update as one data-parallel rank sees it.

    Args:
        trajectories: The segments of the whole global batch, in rollout order: most trajectories have one.
        batches: This rank's micro-batches; their trajectory indices count in `trajectories`.
        num_micro_batches: Total over all data-parallel ranks.
        advantages: [len(trajectories)] fp32.
        weights: [len(trajectories)] fp32, the weight of each response token of a trajectory in the loss.
        old_logprobs: [T] per micro-batch on ranks that see log-probabilities; empty before they are computed.
    """

    trajectories: tuple[Trajectory, ...]
    batches: tuple[PackedBatch, ...]
    num_micro_batches: int
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: tuple[torch.Tensor, ...] = ()

    def with_old_logprobs(self, old_logprobs: Sequence[torch.Tensor]) -> Update:
        """Return a copy with these old log-probabilities."""
        return replace(self, old_logprobs=tuple(old_logprobs))

    @property
    def has_signal(self) -> bool:
        """Whether any advantage that counts in the loss is nonzero."""
        return bool((self.advantages * self.weights).any())

    def micro_batches(self, needs: Needs) -> list[TrainingMicroBatch]:
        """Return the trainer's micro-batches, with the log-probabilities that the objective needs."""
        old = self.old_logprobs or (None,) * len(self.batches)
        return [
            TrainingMicroBatch(
                batch,
                TokenBatch(
                    lengths=batch.lengths,
                    is_response=batch.loss_mask > 0,
                    advantages=batch.spread(self.advantages),
                    weights=batch.spread(self.weights),
                    old_logprobs=logprobs if needs.old_logprobs else None,
                    engine_logprobs=self._engine_logprobs(batch) if needs.engine_logprobs else None,
                ),
            )
            for batch, logprobs in zip(self.batches, old, strict=True)
        ]

    def _engine_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Return the engine's log-probability at each response token of a row [T], 0 elsewhere."""
        row = torch.zeros(len(batch.tokens))
        values = [value for index in batch.trajectory_indices for value in self.trajectories[index].logprobs]
        row[batch.loss_mask > 0] = torch.tensor(values)
        return row

    def versions(self, batch: PackedBatch) -> torch.Tensor:
        """Return the weight version of each response token of a row [T] int64; -1 where unknown, and elsewhere."""
        row = torch.full((len(batch.tokens),), -1)
        row[batch.loss_mask > 0] = torch.cat(
            [row[:0], *(versions_of(self.trajectories[i]) for i in batch.trajectory_indices)]
        )
        return row


def versions_of(trajectory: Trajectory) -> torch.Tensor:
    """Return the weight version of each sampled token [number of them] int64; -1 where unknown."""
    spans = trajectory.versions or (VersionSpan(None, trajectory.num_sampled),)
    versions = [-1 if span.version is None else span.version for span in spans]
    return torch.tensor(versions).repeat_interleave(torch.tensor([span.num_tokens for span in spans]))


def make_updates(config: Config, objective: Objective, groups: Sequence[TrajectoryGroup], dp_rank: int) -> list[Update]:
    """Cut a rollout into optimizer updates and pack each for one data-parallel rank.

    Args:
        config: The resolved configuration.
        objective: The training objective.
        groups: The rollout, in prompt order.
        dp_rank: The rank that the micro-batches are for.
    """
    advantages = objective.advantages(groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    size = config.training.global_batch_size
    return [
        _make_update(config, objective, trajectories[start : start + size], advantages[start : start + size], dp_rank)
        for start in range(0, len(trajectories), size)
    ]


def _make_update(
    config: Config, objective: Objective, trajectories: list[Trajectory], advantages: torch.Tensor, dp_rank: int
) -> Update:
    parts = [trajectory.segments() for trajectory in trajectories]
    segments = [segment for of_trajectory in parts for segment in of_trajectory]
    owner = [index for index, of_trajectory in enumerate(parts) for _ in of_trajectory]
    batches, plan = pack_trajectories(config, segments, dp_rank)
    # The weight of a token does not depend on how its trajectory is cut.
    weights = objective.token_weights(
        [counted_tokens(config.algorithm, trajectory) for trajectory in trajectories],
        [[owner[index] for index in indices] for micro_batches in plan for indices in micro_batches if indices],
    )
    return Update(
        trajectories=tuple(segments),
        batches=tuple(batches),
        num_micro_batches=sum(len(batches) for batches in plan),
        advantages=advantages[owner],
        weights=weights[owner],
    )


def counted_tokens(algorithm: Algorithm, trajectory: Trajectory) -> int:
    """Return how many tokens of a trajectory count in the loss."""
    assert trajectory.num_sampled > 0, f"sample {trajectory.sample_index} of prompt {trajectory.prompt_id} has no token"
    is_masked = algorithm.mask_truncated and trajectory.finish_reason == "length"
    return 0 if is_masked else trajectory.num_sampled


def pack_trajectories(
    config: Config, trajectories: Sequence[Trajectory], dp_rank: int
) -> tuple[list[PackedBatch], list[list[list[int]]]]:
    """Pack trajectories into the same number of micro-batches on every data-parallel rank.

    Args:
        config: The resolved configuration.
        trajectories: Any.
        dp_rank: The rank that the micro-batches are for.

    Returns:
        This rank's micro-batches, and the plan: the indices of the trajectories in each micro-batch of each rank.
    """
    multiple, sequence_multiple = row_multiples(config)
    plan = plan_rows(config, [trajectory.num_tokens for trajectory in trajectories])
    return [build_packed_batch(trajectories, indices, multiple, sequence_multiple) for indices in plan[dp_rank]], plan


def plan_rows(config: Config, num_tokens: Sequence[int]) -> list[list[list[int]]]:
    """Return each data-parallel rank's micro-batches, as indices of trajectories, from their token counts."""
    multiple, sequence_multiple = row_multiples(config)
    lengths = [-(-count // sequence_multiple) * sequence_multiple for count in num_tokens]
    # Round down so that a padded row stays within the budget.
    budget = token_budget(config) // multiple * multiple
    costs, ranks = sample_costs(config, lengths), data_parallel_size(config)
    return pack(lengths, costs, budget, ranks, micro_batch_multiple(config))


def sample_costs(config: Config, lengths: Sequence[int]) -> list[float]:
    """Return the training FLOPs of sequences of these lengths.

    The attention of `rl.megatron_backend.glm5` multiplies each query with all earlier keys and then masks those not
    selected, so the cost counts every key.
    """
    arch = config.model.architecture
    computed = replace(arch, index_topk=arch.max_position_embeddings)
    recompute = config.trainer.recompute_granularity == "full"
    known = {length: sequence_flops(computed, length).training(recompute) for length in set(lengths)}
    return [known[length] for length in lengths]


def row_multiples(config: Config) -> tuple[int, int]:
    """Return the numbers that a row's tokens and a sequence's tokens must be divisible by.

    Context parallelism splits every sequence into two chunks per rank, which balances causal attention. Sequence
    parallelism then splits the tokens of a context-parallel rank evenly over its tensor-parallel ranks.
    """
    tensor, context = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    sequence_multiple = 2 * context if context > 1 else 1
    return math.lcm(tensor * context, sequence_multiple), sequence_multiple

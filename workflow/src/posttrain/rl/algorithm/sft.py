"""Supervised fine-tuning on offline responses.

    loss of a token = -log-probability

It needs no rollout, no engine and no old log-probabilities. Every trajectory has advantage 1; rewards are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from posttrain.rl.algorithm.aggregation import token_weights
from posttrain.rl.algorithm.objective import Needs, TokenBatch
from posttrain.types import TrajectoryGroup


class SupervisedFineTuning:
    """An `Objective` on offline responses.

    Args:
        loss_aggregation: A part of `aggregation`: "token_mean" is the mean over all response tokens of a global batch.
        longest: The longest response in tokens.
    """

    needs = Needs()
    statistics: tuple[str, ...] = ("logprob_mean",)

    def __init__(self, loss_aggregation: str, longest: int):
        self._loss_aggregation, self._longest = loss_aggregation, longest

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """Return 1 for each trajectory; see `Objective`."""
        return torch.ones(sum(len(group.trajectories) for group in groups))

    def token_weights(self, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Objective`."""
        return token_weights(self._loss_aggregation, lengths, micro_batches, self._longest)

    def token_losses(
        self, logprobs: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """See `Objective`."""
        return -logprobs * batch.advantages, {"logprob_mean": logprobs.detach()}

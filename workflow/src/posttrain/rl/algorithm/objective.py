"""The objective: the interface between the trainer, which runs passes and reduces numbers, and an algorithm.

An objective has three functions. `advantages` turns groups of trajectories into an advantage per trajectory;
`token_weights` turns lengths into the weight of each response token in the loss of a global batch; `token_losses` turns
log-probabilities into a loss per token. The trainer minimises

    sum over all response tokens of  weight * token loss

and knows nothing else of the loss. Response tokens are those in the trajectories' loss masks: an agent's trajectory may
have several stretches of them. Shapes: N trajectories of a global batch, T tokens of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from posttrain.types import TrajectoryGroup


@dataclass(frozen=True)
class Needs:
    """The inputs that an objective needs.

    Args:
        rollout: Samples of the current policy, hence engines; otherwise responses are offline.
        old_logprobs: Log-probabilities of the trainer's policy before the first update on a rollout.
        engine_logprobs: Log-probabilities that the engine reported when sampling.
    """

    rollout: bool = False
    old_logprobs: bool = False
    engine_logprobs: bool = False


@dataclass(frozen=True)
class TokenBatch:
    """An objective's view of a packed micro-batch: values per token, of which only response tokens count.

    Args:
        lengths: Tokens of each sequence of the row, in order; padding is a sequence, too.
        is_response: [T] bool, where the target is a response token.
        advantages: [T] fp32, the advantage of the token's trajectory; 0 outside responses.
        weights: [T] fp32, the token's weight in the loss of the global batch; 0 outside responses.
        old_logprobs: [T] fp32, of the policy before the update; None if not needed.
        engine_logprobs: [T] fp32, 0 outside responses; None if not needed.
    """

    lengths: tuple[int, ...]
    is_response: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    engine_logprobs: torch.Tensor | None = None

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on another device."""
        old, engine = (
            given if given is None else given.to(device) for given in (self.old_logprobs, self.engine_logprobs)
        )
        is_response, advantages, weights = (v.to(device) for v in (self.is_response, self.advantages, self.weights))
        return TokenBatch(self.lengths, is_response, advantages, weights, old, engine)

    def per_sequence(self, values: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return at each token the `reduce` of its sequence's response tokens.

        Args:
            values: [T].
            reduce: Maps [number of response tokens] to a scalar; not called for a sequence without response tokens.

        Returns:
            [T]; 0 in sequences without response tokens.
        """
        rows = zip(values.split(self.lengths), self.is_response.split(self.lengths), strict=True)
        # Loop over sequences: on GPUs torch's scatter sums are not deterministic. The sum of nothing is 0 with a
        # gradient, because a rank without a trajectory must also run the backward pass, for which others wait.
        reduced = [reduce(row[mask]) if mask.any() else row[mask].sum() for row, mask in rows]
        return torch.cat([value.expand(length) for value, length in zip(reduced, self.lengths, strict=True)])


class Objective(Protocol):
    """An objective; see the module docstring."""

    @property
    def needs(self) -> Needs:
        """The inputs that the objective asks for."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names (of `rl.algorithm.statistics`) that `token_losses` reports."""

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """Return [N] fp32, one advantage per trajectory of all groups, in order.

        Raises:
            ValueError: A reward is not finite, or trajectories are in the wrong group.
        """

    def token_weights(self, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [N] fp32, the weight of each response token of a trajectory in the loss of its global batch.

        Args:
            lengths: Response tokens of each trajectory; 0 for one that does not count: its weight is 0.
            micro_batches: Samples of each micro-batch of all ranks.
        """

    def token_losses(
        self, logprobs: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of each token [T], and statistic name -> value per token [T].

        Args:
            logprobs: [T] fp32 of the policy being trained; carries the gradient.
            batch: The other token values.
        """

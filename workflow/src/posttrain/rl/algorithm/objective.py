"""The objective: the interface between the trainer, which runs passes and reduces numbers, and an algorithm.

A trainer asks an objective three times. Groups of samples become an advantage per sample; lengths become the weight of
each response token in the loss of a global batch; log-probabilities become a loss per token. What the trainer minimises
is then

    sum over all response tokens of  weight * token loss

and it knows nothing else of the loss. Shapes: N samples of a global batch, T tokens of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from posttrain.types import SampleGroup


@dataclass(frozen=True)
class Needs:
    """What an objective wants to be given.

    Args:
        rollout: Samples of the present policy, so engines; otherwise responses are given.
        old_logprobs: Log-probabilities of the trainer's policy before the first update on a rollout.
        engine_logprobs: Those that the engine reported when it sampled.
    """

    rollout: bool = False
    old_logprobs: bool = False
    engine_logprobs: bool = False


@dataclass(frozen=True)
class TokenBatch:
    """A packed micro-batch as an objective sees it: values per token, of which only response tokens count.

    Args:
        lengths: Tokens of each sequence of the row, in order; padding is a sequence, too.
        is_response: [T] bool, where the target is a response token.
        advantages: [T] fp32, the advantage of the token's sample; 0 outside responses.
        weights: [T] fp32, the token's share in the loss of the global batch; 0 outside responses.
        old_logprobs: [T] fp32, of the policy before the update; None where the objective needs none.
        engine_logprobs: [T] fp32, 0 outside responses; None where the objective needs none.
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
        """Return, at each token, what `reduce` makes of the response tokens of its sequence.

        Args:
            values: [T].
            reduce: [number of response tokens] to a number; not called for a sequence that has none.

        Returns:
            [T]; 0 in sequences without response tokens.
        """
        rows = zip(values.split(self.lengths), self.is_response.split(self.lengths), strict=True)
        # Row by row: on GPUs, torch's scattered sums depend on the order in which they arrive. A sum of nothing is 0
        # and has a gradient: that of a rank without a sample goes backward, too, for others wait for it.
        reduced = [reduce(row[mask]) if mask.any() else row[mask].sum() for row, mask in rows]
        return torch.cat([value.expand(length) for value, length in zip(reduced, self.lengths, strict=True)])


class Objective(Protocol):
    """An objective; see the head of this file."""

    @property
    def needs(self) -> Needs:
        """The inputs that the objective asks for."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names, in `rl.algorithm.statistics`, of what `token_losses` reports."""

    def advantages(self, groups: Sequence[SampleGroup]) -> torch.Tensor:
        """Return [N] fp32, one advantage per sample of all groups, in order.

        Raises:
            ValueError: A reward is not finite, or groups are not what their prompts say.
        """

    def token_weights(self, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [N] fp32, the weight of each response token of a sample in the loss of its global batch.

        Args:
            lengths: Response tokens of each sample.
            micro_batches: Samples of each micro-batch of all ranks.
        """

    def token_losses(
        self, logprobs: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of each token [T], and under each of its statistics' names a value per token [T].

        Args:
            logprobs: [T] fp32 of the policy being trained; carries the gradient.
            batch: What goes with them.
        """

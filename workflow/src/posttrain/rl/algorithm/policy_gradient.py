"""The policy gradient, composed of five parts that are chosen one by one.

    advantage      rewards of a group -> how much better than expected a trajectory was
    ratio_level    level of the importance ratio exp(logprobs - old_logprobs): token or sequence
                   (old_logprobs: the trainer's, or the engine's)
    clip           ratio and advantage -> loss per token
    aggregation    losses per token -> one number
    correction     the engine's log-probabilities beside the trainer's -> a factor of each token's loss

Published algorithms are lines of `config/algorithms.yaml`. Any other combination works, too: parts are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from posttrain.rl.algorithm.aggregation import token_weights
from posttrain.rl.algorithm.objective import Needs, TokenBatch
from posttrain.rl.algorithm.parts import load_part
from posttrain.rl.algorithm.settings import Algorithm
from posttrain.rl.algorithm.statistics import NUM_PARTS, RATIO_EDGES, RATIO_HISTOGRAM
from posttrain.types import TrajectoryGroup

# Statistics that are meaningful only if the trainer computed both sides.
_OF_TRAINER = ("first_update_ratio_max_abs_deviation",)


class PolicyGradient:
    """An `Objective` of five parts.

    Args:
        settings: The parts and their parameters.
        longest: The response limit in tokens.
    """

    def __init__(self, settings: Algorithm, longest: int):
        self._settings, self._longest = settings, longest
        self._advantages = load_part("advantage", settings.advantage_estimator).advantages
        self._level = load_part("level", settings.ratio_level).combine
        self._clip = load_part("clip", settings.clip).token_losses
        self._correction_level = load_part("level", settings.correction_level).combine
        self._correct: Callable[[torch.Tensor, Algorithm], torch.Tensor] | None = None
        if settings.correction != "none":
            self._correct = load_part("correction", settings.correction).factors

    @property
    def needs(self) -> Needs:
        """Rollouts and old log-probabilities; the engine's in their place or for the correction."""
        from_engine = self._settings.old_logprobs == "engine"
        return Needs(True, old_logprobs=not from_engine, engine_logprobs=from_engine or self._correct is not None)

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Objective`."""
        names = (
            "importance_ratio_mean",
            "importance_ratio_square_mean",
            *_OF_TRAINER * self.needs.old_logprobs,
            "clip_fraction",
            "approx_kl",
        )
        names += tuple(RATIO_HISTOGRAM.values())
        return names + (("correction_mean", "correction_zero_fraction") if self._correct else ())

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
        """See `Objective`; all groups have one size. If a rollout exceeds the dataset, a prompt may have two groups."""
        _check_groups(groups)
        given = [trajectory.reward for group in groups for trajectory in group.trajectories]
        if wrong := [reward for reward in given if reward is not None and not math.isfinite(reward)]:
            raise ValueError(f"rewards must be finite, got {wrong[:5]}")
        numbers = [math.nan if reward is None else reward for reward in given]
        rewards = torch.tensor(numbers, dtype=torch.float32).view(len(groups), -1)
        lengths = torch.tensor([[trajectory.num_sampled for trajectory in group.trajectories] for group in groups])
        return self._advantages(rewards, lengths, self._settings).flatten()

    def token_weights(self, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Objective`."""
        return token_weights(self._settings.loss_aggregation, lengths, micro_batches, self._longest)

    def token_losses(
        self, logprobs: torch.Tensor, batch: TokenBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """See `Objective`."""
        old_logprobs = batch.old_logprobs if self.needs.old_logprobs else batch.engine_logprobs
        assert old_logprobs is not None, "the last stage has computed the old log-probabilities"
        log_ratio = self._level(logprobs - old_logprobs, batch)
        factors = self._factors(batch)
        if factors is not None:
            # Masked tokens have no gradient, however large their ratio is.
            log_ratio = log_ratio.masked_fill(factors == 0, 0.0)
        losses, clipped = self._clip(log_ratio, logprobs, batch.advantages, self._settings)
        statistics = _movement(logprobs.detach(), old_logprobs, batch) | {"clip_fraction": clipped}
        if factors is not None:
            losses = losses * factors
            statistics |= {"correction_mean": factors, "correction_zero_fraction": factors == 0}
        return losses, statistics

    def _factors(self, batch: TokenBatch) -> torch.Tensor | None:
        """Return the engine correction factor of each token's loss [T]; None without correction."""
        if self._correct is None:
            return None
        assert batch.engine_logprobs is not None, "the trajectories have the engine's log-probabilities"
        assert batch.old_logprobs is not None, "the last stage has computed the old log-probabilities"
        difference = self._correction_level(batch.old_logprobs - batch.engine_logprobs, batch)
        return self._correct(difference, self._settings)


def approximate_kl(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ratio - 1 - log ratio of each token; its mean over tokens that the old policy sampled is KL(old || new).

    Source: Schulman, Approximating KL Divergence (2020), k3.

    Args:
        logprobs: [T] of the current policy.
        old_logprobs: [T] of the policy that sampled.

    Returns:
        [T], never negative.

    Example:
        A token that became twice as likely: 2 - 1 - ln 2 = 0.3069.
    """
    log_ratio = logprobs - old_logprobs
    return log_ratio.exp() - 1 - log_ratio


def _movement(logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Return how far each token has moved since the rollout, in FP64."""
    now = logprobs.double()
    ratio = (now - old_logprobs).exp()
    edges = torch.tensor(RATIO_EDGES, dtype=ratio.dtype).to(ratio.device)
    bins, parts = torch.bucketize(ratio, edges), _parts_of_responses(batch)
    return {
        **{name: (parts == part) & (bins == place) for (part, place), name in RATIO_HISTOGRAM.items()},
        "importance_ratio_mean": ratio,
        "importance_ratio_square_mean": ratio**2,
        "first_update_ratio_max_abs_deviation": (ratio - 1).abs(),
        "approx_kl": approximate_kl(now, old_logprobs),
    }


def _parts_of_responses(batch: TokenBatch) -> torch.Tensor:
    """Return [T] int64, the part of its response (cut into equal parts) of each token; arbitrary outside responses.

    Example:
        A response of 5 tokens in 4 parts: 0, 0, 1, 2, 3.
    """
    is_response = batch.is_response
    lengths = torch.tensor(batch.lengths).to(is_response.device)
    sequence = torch.arange(len(lengths), device=lengths.device)
    sequence = sequence.repeat_interleave(lengths, output_size=len(is_response))
    counts = torch.zeros_like(lengths).index_add(0, sequence, is_response.long())
    place = is_response.cumsum(0) - 1 - (counts.cumsum(0) - counts)[sequence]
    return place * NUM_PARTS // counts.clamp(min=1)[sequence]


def _check_groups(groups: Sequence[TrajectoryGroup]) -> None:
    """Refuse trajectories in the wrong group, which would otherwise be a silent error."""
    for group in groups:
        strangers = sorted({trajectory.prompt_id for trajectory in group.trajectories} - {group.prompt.prompt_id})
        if strangers:
            raise ValueError(f"the group of prompt {group.prompt.prompt_id} holds trajectories of prompts {strangers}")
    sizes = sorted({len(group.trajectories) for group in groups})
    if len(sizes) != 1 or sizes[0] < 1:
        raise ValueError(f"groups must have one size, and at least one trajectory; found sizes {sizes}")

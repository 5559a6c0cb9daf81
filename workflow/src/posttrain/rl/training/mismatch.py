"""Compares trainer and engine log-probabilities, within what their precisions allow (`trainer.mismatch`).

A large difference means that the trajectories are not from the policy: an engine has the wrong weights or computes
differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from posttrain.config.derived import is_off_policy, mismatch_limits
from posttrain.config.schema import Config
from posttrain.report.rank_progress import write_exit_reason
from posttrain.rl.algorithm.mismatch import Mismatch, compare_logprobs
from posttrain.rl.megatron_backend.model import Policy
from posttrain.rl.megatron_backend.plain_data import gather_plain
from posttrain.rl.megatron_backend.quantized_weights import QuantizedWeights
from posttrain.rl.megatron_backend.ranks import gather_over_data_parallel
from posttrain.rl.megatron_backend.served_values import ServedValues
from posttrain.rl.megatron_backend.train_step import compute_logprobs
from posttrain.rl.training.batch import Update, versions_of
from posttrain.types import Trajectory

log = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """The mismatch exceeds its limit, and `trainer.mismatch.action` is stop."""


class EngineComparison:
    """Compares the trainer's log-probabilities with the engine's; collective.

    Args:
        config: The resolved configuration.
        policy: The trained model.
        values: The engines' form of this rank's shards.
    """

    def __init__(self, config: Config, policy: Policy, values: ServedValues):
        self._config, self._policy = config, policy
        self._lender = QuantizedWeights(policy, values)

    def is_due(self, step: int) -> bool:
        """Return whether a step (from 0) has extra passes for comparison."""
        interval = self._config.trainer.mismatch_interval
        return interval > 0 and (step % interval == 0 or step == self._config.training.num_steps - 1)

    def on_served_weights(self, step: int, updates: Sequence[Update]) -> Mismatch | None:
        """Compare using exactly the weights that engines serve, in a separate pass; None if not due.

        Args:
            step: From 0.
            updates: Before any of them is applied.
        """
        if not self.is_due(step):
            return None
        with self._lender.lent():
            logprobs = [compute_logprobs(self._policy, update.batches) for update in updates]
        return _compare(updates, logprobs, self._compared(step))

    def on_own_weights(self, step: int, updates: Sequence[Update], served: Mismatch | None) -> Mismatch | None:
        """Compare using the trainer's own weights, then warn or stop if the mismatch is too large.

        With `rollout.max_staleness` only tokens count that these weights sampled; None if there are none.

        Args:
            step: From 0.
            updates: With their old log-probabilities, before any of them is applied.
            served: The result of `on_served_weights`.

        Raises:
            MismatchError: The mismatch is too large; raised on every rank.
        """
        own = _compare(updates, [update.old_logprobs for update in updates], self._compared(step))
        if own:
            heed_mismatch(self._config, step, own, served)
        return own

    def _compared(self, step: int) -> Callable[[Trajectory], torch.Tensor | None]:
        """Return which sampled tokens of a trajectory are compared: a mask, or None for all.

        A token of older weights differs by the updates since. With rollout.on_new_weights=keep the KV cache of a
        trajectory of several versions is of older weights, too.
        """
        if not is_off_policy(self._config):
            return lambda trajectory: None
        keeps_cache = self._config.rollout.on_new_weights == "keep"

        def is_fresh(trajectory: Trajectory) -> torch.Tensor:
            fresh = versions_of(trajectory).clamp(min=0) == step
            return fresh & fresh.all() if keeps_cache else fresh

        return is_fresh


def _compare(
    updates: Sequence[Update],
    logprobs: Sequence[Sequence[torch.Tensor]],
    compared: Callable[[Trajectory], torch.Tensor | None],
) -> Mismatch | None:
    """Compare trainer and engine log-probabilities over the sampled tokens of all ranks; None if none is compared.

    Raises:
        ValueError: They are not finite; raised on every rank.
    """
    own, engine = [torch.empty(0)], [torch.empty(0)]
    for update, rows in zip(updates, logprobs, strict=True):
        for batch, row in zip(update.batches, rows, strict=False):  # only the last pipeline stage has them
            for index, values in batch.response_values(row.cpu()).items():
                mask = compared(update.trajectories[index])
                chosen = slice(None) if mask is None else mask
                own.append(values[chosen])
                engine.append(torch.tensor(update.trajectories[index].logprobs)[chosen])
    # Compare across data-parallel ranks, then share the result with all ranks.
    of_all = [torch.cat(gather_over_data_parallel(torch.cat(values))) for values in (own, engine)]
    found, wrong = None, ""
    if len(of_all[0]):
        try:
            found = compare_logprobs(*of_all)
        except ValueError as error:
            wrong = str(error)
    for numbers, told in gather_plain((found, wrong)):
        if told:
            raise ValueError(told)
        if numbers:
            return Mismatch(**numbers)
    return None


def share_of_limit(config: Config, own: Mismatch, served: Mismatch | None) -> float:
    """Return mean |trainer - engine| divided by its limit, the larger of both comparisons; above 1 is too far.

    Args:
        config: The resolved configuration.
        own: Comparison that uses the trainer's own weights.
        served: Comparison that uses the served weights; None if not measured.
    """
    limit_own, limit_served = mismatch_limits(config)
    share = own.abs_diff_mean / limit_own
    return share if served is None else max(share, served.abs_diff_mean / limit_served)


def heed_mismatch(config: Config, step: int, own: Mismatch, served: Mismatch | None) -> None:
    """Warn or stop if trainer and engine differ too much; call it before the samples change any weight.

    Args:
        config: The resolved configuration.
        step: From 0.
        own: See `share_of_limit`.
        served: See `share_of_limit`.

    Raises:
        MismatchError: The configuration asks for it.
    """
    share = share_of_limit(config, own, served)
    if share <= 1:
        return
    on_served = "" if served is None else f", {served.abs_diff_mean:.3g} with the weights served"
    found = (
        f"step {step + 1}: trainer and engine are {share:.3g} times further apart than expected: mean "
        f"|trainer - engine| {own.abs_diff_mean:.3g} nats with the trainer's own weights{on_served}; "
        f"limits {mismatch_limits(config)}"
    )
    if config.trainer.mismatch.action == "stop":
        words = (
            f"{found}. Nothing was learned from its samples. See the engines' logs; remove "
            f"train/rollouts/step_{step:06d} to sample them anew, or set='trainer.mismatch.action=warn' to use them"
        )
        # A retry would replay the same samples and fail again.
        write_exit_reason(words)
        raise MismatchError(words)
    log.warning("%s", found)

"""Whether trainer and engine are as near to each other as their precisions allow (`trainer.mismatch`).

Far apart, the samples are not the policy's: an engine has other weights than it should, or computes something else.
"""

from __future__ import annotations

import logging

from posttrain.algorithm.mismatch import Mismatch
from posttrain.config.derived import mismatch_limits
from posttrain.config.schema import Config
from posttrain.observability.rank_progress import leave_last_words

log = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """Trainer and engine are too far apart, and `trainer.mismatch.action` is stop."""


def share_of_limit(config: Config, own: Mismatch, served: Mismatch | None) -> float:
    """Return the mean |trainer - engine| over its limit, the larger of the two comparisons; above 1 is too far.

    Args:
        config: The resolved configuration.
        own: With the trainer's own weights.
        served: With the weights served; None where it was not measured.
    """
    limit_own, limit_served = mismatch_limits(config)
    share = own.abs_diff_mean / limit_own
    return share if served is None else max(share, served.abs_diff_mean / limit_served)


def heed_mismatch(config: Config, step: int, own: Mismatch, served: Mismatch | None) -> None:
    """Warn, or stop, where trainer and engine are too far apart; to be called before the samples change any weight.

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
        # Another attempt would replay the same samples, and refuse them again.
        leave_last_words(words)
        raise MismatchError(words)
    log.warning("%s", found)

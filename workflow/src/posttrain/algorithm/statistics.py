"""What an objective reports besides its loss: every name, and how values of tokens become one number.

Read by the table of metrics, so without torch. An objective declares those names that it gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEAN, LARGEST = "mean", "largest"


@dataclass(frozen=True)
class Statistic:
    """One number of an update.

    Args:
        doc: Its definition.
        over_tokens: "mean" over the response tokens of the global batch; over a step's updates, it is weighted by their
            tokens. "largest": of all tokens of the step's first update.
        unit: As printed on an axis.
    """

    doc: str
    over_tokens: str = MEAN
    unit: str = ""


STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic("Mean entropy of the policy at response tokens, at the sampling temperature", unit="nats"),
    "importance_ratio_mean": Statistic("Mean of exp(logprobs - old_logprobs) over response tokens"),
    "first_update_ratio_max_abs_deviation": Statistic(
        "Largest |importance ratio - 1| of the step's first update: 0 when old and new log-probabilities "
        "come from the same weights and the same computation",
        LARGEST,
    ),
    "clip_fraction": Statistic("Share of response tokens whose clipped loss is the larger one"),
    "approx_kl": Statistic("k3 estimate of KL(old policy || new policy) over response tokens", unit="nats"),
    "correction_mean": Statistic("Mean factor that corrects a token's loss for the engine"),
    "correction_zero_fraction": Statistic("Share of response tokens that the correction leaves out"),
}

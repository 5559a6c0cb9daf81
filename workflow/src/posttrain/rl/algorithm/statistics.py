"""Statistics that objectives report besides the loss: their names, and how token values are reduced to one number.

The table of metrics reads it, so it imports no torch. Each objective declares the names that it reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEAN, LARGEST = "mean", "largest"

# Histogram of importance ratios: number of response parts, and the bin edges and names in each.
NUM_PARTS = 4
RATIO_EDGES = (0.8, 0.95, 1.05, 1.25)
_BINS = ("far_below", "below", "near", "above", "far_above")


@dataclass(frozen=True)
class Statistic:
    """One number of an update.

    Args:
        doc: Its definition.
        over_tokens: "mean" over the response tokens of the global batch, and over a step's updates weighted by tokens;
            "largest": the maximum over all tokens of the step's first update.
        unit: As printed on an axis.
    """

    doc: str
    over_tokens: str = MEAN
    unit: str = ""


RATIO_HISTOGRAM = {
    (part, place): f"ratio_part{part + 1}_{name}" for part in range(NUM_PARTS) for place, name in enumerate(_BINS)
}


def _doc_of_bin(part: int, place: int) -> str:
    low, high = (("0", *map(str, RATIO_EDGES), "any")[place + end] for end in (0, 1))
    return (
        f"Share of response tokens that stand in part {part + 1} of {NUM_PARTS} of their response and whose ratio is "
        f"from {low} to {high}"
    )


STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic("Mean entropy of the policy at response tokens, at the sampling temperature", unit="nats"),
    "logprob_mean": Statistic("Mean log-probability of the given response tokens", unit="nats"),
    "importance_ratio_mean": Statistic("Mean of exp(logprobs - old_logprobs) over response tokens"),
    "importance_ratio_square_mean": Statistic("Mean of its square; with the mean it gives the effective sample size"),
    "first_update_ratio_max_abs_deviation": Statistic(
        "Largest |importance ratio - 1| of the step's first update: 0 when old and new log-probabilities "
        "come from the same weights and the same computation",
        LARGEST,
    ),
    "clip_fraction": Statistic("Share of response tokens whose clipped loss is the larger one"),
    "approx_kl": Statistic("k3 estimate of KL(old policy || new policy) over response tokens", unit="nats"),
    "correction_mean": Statistic("Mean factor that corrects a token's loss for the engine"),
    "correction_zero_fraction": Statistic("Share of response tokens that the correction leaves out"),
    **{name: Statistic(_doc_of_bin(*place)) for place, name in RATIO_HISTOGRAM.items()},
}

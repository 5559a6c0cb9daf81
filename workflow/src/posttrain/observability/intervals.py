"""How sure a pass rate is, and its change.

An interval holds whatever the samples of a prompt have in common: it counts each prompt once. That two evaluations ask
the same prompts is not used either, so that of a change is rather too wide.

Source: Newcombe, Interval estimation for the difference between independent proportions (1998), method 10, from two
intervals of Wilson (1927).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Of a normal distribution, 95 % lie within so many standard deviations.
Z = 1.959964


def rate_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the change of the pass rate, and the ends of its 95 % interval.

    Args:
        before: Result of an evaluation: "pass_rate", "num_prompts".
        after: The same of a later one.

    Example:
        56 of 70 against 48 of 80: (0.2, 0.0524, 0.3339), Newcombe's table II.
    """
    (p0, low0, high0), (p1, low1, high1) = (wilson(r["pass_rate"], r["num_prompts"]) for r in (before, after))
    change = p1 - p0
    return change, change - math.hypot(p1 - low1, high0 - p0), change + math.hypot(high1 - p1, p0 - low0)


def wilson(rate: float, count: int) -> tuple[float, float, float]:
    """Return a rate and the ends of Wilson's interval around it.

    Args:
        rate: Share of successes.
        count: Independent trials.
    """
    middle = rate + Z**2 / (2 * count)
    reach = Z * math.sqrt(rate * (1 - rate) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return rate, (middle - reach) / scale, (middle + reach) / scale

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


def paired_loss(lost: float, won: float, count: int) -> tuple[float, float]:
    """Return the loss of a rate among the same prompts, and the upper end of its 95 % interval.

    The interval is Tango's, of the difference of paired proportions (Statistics in Medicine 17, 1998, equation 10): it
    has a width also where no prompt differs, Z^2 / (count + Z^2).

    Args:
        lost: Prompts that passed before and do not any more; parts of prompts with several samples.
        won: The same the other way round.
        count: All prompts.

    Example:
        None of 400 differs: (0, 0.0095). Of 100, four lost and one won: (0.03, 0.0900).
    """
    low, high = (lost - won) / count, 1.0
    loss = low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tango(lost, won, count, middle) > -Z else (low, middle)
    return loss, high


def _tango(lost: float, won: float, count: int, loss: float) -> float:
    """Return the score of a supposed loss, in standard deviations."""
    slope = (2 * count - lost + won) * loss - lost - won
    root = math.sqrt(max(slope**2 + 8 * count * won * loss * (1 - loss), 0.0))
    likeliest = (root - slope) / (4 * count)
    variance = count * (2 * likeliest + loss * (1 - loss))
    return (lost - won - count * loss) / math.sqrt(variance) if variance > 0 else 0.0

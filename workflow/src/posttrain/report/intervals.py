"""Confidence intervals of a pass rate and of its change.

Two evaluations use the same prompts, so a change is the mean of one difference per prompt, even if the samples of a
prompt are correlated (Miller, Adding error bars to evals, arXiv:2411.00640, section 4.2). `make test-faults
PART=statistics` measures error rates and power of these intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# 95 % of a normal distribution lie within this many standard deviations.
Z = 1.959964
# If fewer prompts differ, their variance is a poor estimate for the prompts that could have differed.
FEW = 6

# A change, and the bounds of its 95 % interval.
Change = tuple[float, float, float]


def rate_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """Return the change of the pass rate between two evaluations, and the bounds of its 95 % interval.

    Results of older versions have no rates by prompt. For those, and for evaluations of different prompts, the interval
    is that of two independent groups with one trial per prompt, which is too wide: Newcombe, Interval estimation for
    the difference between independent proportions (1998), method 10.

    Args:
        before: Result of `rl.evaluation.heldout.summarize`.
        after: The same of a later evaluation.

    Example:
        56 of 70 against 48 of 80: (0.2, 0.0524, 0.3339), Newcombe's table II.
    """
    if pairs := _pairs(before, after, column=1):
        step = 1 / max(before["num_samples"], after["num_samples"])
        return paired_change([new - old for old, new in pairs], step)
    (p0, low0, high0), (p1, low1, high1) = (wilson(r["pass_rate"], r["num_prompts"]) for r in (before, after))
    change = p1 - p0
    return change, change - math.hypot(p1 - low1, high0 - p0), change + math.hypot(high1 - p1, p0 - low0)


def reward_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change | None:
    """Return the change of the mean reward of graded samples, and the bounds of its 95 % interval.

    None where rewards are 0 or 1, so that the pass rate says the same, and where results have no rewards by prompt.
    """
    if not (before.get("has_partial_credit") or after.get("has_partial_credit")):
        return None
    pairs = _pairs(before, after, column=2)
    if not pairs:
        return None
    rewards = [reward for pair in pairs for reward in pair]
    step = (max(rewards) - min(rewards)) / max(before["num_samples"], after["num_samples"])
    return paired_change([new - old for old, new in pairs], step)


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any], column: int) -> list[tuple[float, float]]:
    """Return a value before and after for each prompt that has both; none where the prompts are not the same."""
    old, new = ({row[0]: row[column] for row in result.get("by_prompt", ())} for result in (before, after))
    prompts = old if old.keys() == new.keys() else ()
    return [(old[prompt], new[prompt]) for prompt in prompts if None not in (old[prompt], new[prompt])]


def wilson(rate: float, count: int) -> Change:
    """Return a rate and the bounds of its Wilson interval (1927).

    Args:
        rate: Share of successes.
        count: Independent trials.
    """
    middle = rate + Z**2 / (2 * count)
    reach = Z * math.sqrt(rate * (1 - rate) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    low, high = (middle - reach) / scale, (middle + reach) / scale
    # The bounds of 0 and 1 are rounded to either side.
    return rate, min(rate, max(0.0, low)), max(rate, min(1.0, high))


def paired_change(differences: Sequence[float], step: float) -> Change:
    """Return the mean of differences, and the bounds of its 95 % interval.

    Args:
        differences: Of each prompt.
        step: The smallest nonzero difference of a prompt; it bounds the change if no prompt differs.

    Example:
        None of 400 prompts with one sample differs: (0, -0.0095, 0.0095). Of 100, four lost and one won:
        (-0.03, -0.0900, 0.0202).
    """
    change = math.fsum(differences) / len(differences)
    return change, -_upper_end([-one for one in differences], step), _upper_end(differences, step)


def _upper_end(differences: Sequence[float], step: float) -> float:
    sizes = [abs(one) for one in differences if one]
    largest = max(sizes, default=step)
    if len(sizes) < FEW or math.isclose(min(sizes), largest):
        gained, lost = (math.fsum(max(sign * one, 0.0) for one in differences) for sign in (1, -1))
        return largest * _tango(gained / largest, lost / largest, len(differences)) if largest else 0.0
    return _skewed_end(differences)


def _skewed_end(differences: Sequence[float]) -> float:
    """Return the upper end of a score interval whose variance follows the supposed mean.

    With the moments m_2 and m_3 around the mean, a supposed mean that is u higher has the variance
    m_2 + u^2 + u max(0, m_3 / m_2): the mean square around it, and the rate m_3 / m_2 at which exponential tilting
    to a higher mean raises a variance. For rare equal losses this is the score interval of a Poisson count. Without
    skew it is that of a self-normalised sum, which holds its level where differences are symmetric (Efron, Student's
    t-test under symmetry conditions, JASA 64, 1969).
    """
    count = len(differences)
    mean = math.fsum(differences) / count
    second, third = (math.fsum((one - mean) ** power for one in differences) / count for power in (2, 3))
    half_skew = max(0.0, third / second) * Z**2 / (2 * (count - Z**2))
    return mean + half_skew + math.sqrt(half_skew**2 + Z**2 * second / (count - Z**2))


def _tango(gained: float, lost: float, count: int) -> float:
    """Return the upper end of Tango's 95 % interval for the gain of a rate among the same prompts.

    Source: Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design (Statistics in Medicine 17, 1998), equation 10. It has a width also where no prompt differs,
    Z^2 / (count + Z^2).

    Args:
        gained: Prompts that passed afterwards alone.
        lost: Prompts that passed before alone.
        count: All prompts.

    Example:
        Of 20, three lost and eight gained: 0.525.
    """
    low, high = (gained - lost) / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tango_score(gained, lost, count, middle) > -Z else (low, middle)
    return high


def _tango_score(gained: float, lost: float, count: int, gain: float) -> float:
    """Return how many standard deviations what was found is from a supposed gain."""
    slope = (2 * count - gained + lost) * gain - gained - lost
    root = math.sqrt(max(slope**2 + 8 * count * lost * gain * (1 - gain), 0.0))
    likeliest = (root - slope) / (4 * count)
    variance = count * (2 * likeliest + gain * (1 - gain))
    return (gained - lost - count * gain) / math.sqrt(variance) if variance > 0 else 0.0

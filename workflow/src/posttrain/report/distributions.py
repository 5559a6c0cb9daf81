"""Percentiles of a few numbers, by the nearest rank: every percentile is one of the values."""

from __future__ import annotations

from collections.abc import Sequence

# Percentiles of which a curve consists.
CURVE = tuple(range(0, 101, 5))


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of values, of which there is at least one.

    Example:
        Of (4, 1, 2) the 50th percentile is 2, the 90th is 4.
    """
    return _of_sorted(sorted(values), percent)


def curve(values: Sequence[float]) -> list[float]:
    """Return the percentiles `CURVE` of values, of which there is at least one."""
    ordered = sorted(values)
    return [_of_sorted(ordered, percent) for percent in CURVE]


def _of_sorted(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

"""Percentiles by the nearest rank, against NumPy's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from posttrain.report.distributions import CURVE, curve, percentile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 101])
def test_percentiles_are_those_of_the_inverted_distribution(count: int) -> None:
    drawn = random.Random(count)
    values = [drawn.random() for _ in range(count)]
    expected = [float(np.percentile(values, percent, method="inverted_cdf")) for percent in CURVE]
    assert curve(values) == expected
    assert [percentile(values, percent) for percent in CURVE] == expected

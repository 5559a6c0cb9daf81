"""Losses among the same prompts; the other intervals are tried with the report."""

import math

import pytest

from posttrain.observability.intervals import Z, paired_loss


@pytest.mark.parametrize("count", [20, 400, 10_000])
def test_no_pair_that_differs_bounds_the_loss_by_their_number(count):
    loss, at_most = paired_loss(0, 0, count)
    assert loss == 0
    assert at_most == pytest.approx(Z**2 / (count + Z**2), rel=1e-9)


def test_a_loss_among_pairs_is_bounded_as_often_as_it_says():
    """97.5 % of experiments have the true loss below the upper end, each counted with its exact probability."""
    count, lost, won = 40, 0.15, 0.05
    covered = 0.0
    for b in range(count + 1):
        for c in range(count + 1 - b):
            ways = math.comb(count, b) * math.comb(count - b, c)
            probability = ways * lost**b * won**c * (1 - lost - won) ** (count - b - c)
            covered += probability * (paired_loss(b, c, count)[1] >= lost - won)
    assert covered == pytest.approx(0.975, abs=0.01)


def test_all_lost_and_all_won():
    assert paired_loss(10, 0, 10) == (1.0, 1.0)
    loss, at_most = paired_loss(0, 10, 10)
    assert loss == -1.0
    assert -1 < at_most < 0

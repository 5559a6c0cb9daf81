import itertools
import math

import pytest
import torch

from posttrain.algorithm.policy_loss import approximate_kl, clipped_policy_loss, count_non_finite

LOW, HIGH = 0.2, 0.28
RATIOS = (0.1, 0.5, 0.79, 0.81, 0.95, 1.0, 1.05, 1.27, 1.29, 1.5, 4.0)
ADVANTAGES = (-2.0, -0.3, 0.0, 0.3, 2.0)


def _closed_form(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """Return loss, whether it is clipped, and d loss / d logprob, case by case."""
    if advantage > 0 and ratio > 1 + HIGH:
        return -(1 + HIGH) * advantage, True, 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -(1 - LOW) * advantage, True, 0.0
    return -ratio * advantage, False, -ratio * advantage


@pytest.mark.parametrize(("ratio", "advantage"), list(itertools.product(RATIOS, ADVANTAGES)))
def test_grid_of_ratio_and_sign_against_the_closed_form(ratio, advantage):
    logprobs = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5], dtype=torch.float64)
    loss, clipped = clipped_policy_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), LOW, HIGH)
    loss.sum().backward()
    expected_loss, expected_clipped, expected_gradient = _closed_form(ratio, advantage)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert clipped.item() == expected_clipped
    assert logprobs.grad.item() == pytest.approx(expected_gradient, rel=1e-12, abs=1e-15)


def test_clip_fraction_of_the_grid():
    pairs = list(itertools.product(RATIOS, ADVANTAGES))
    logprobs = torch.tensor([math.log(ratio) for ratio, _ in pairs])
    advantages = torch.tensor([advantage for _, advantage in pairs])
    _, clipped = clipped_policy_loss(logprobs, torch.zeros(len(pairs)), advantages, LOW, HIGH)
    # Three ratios above 1.28 with two positive advantages, three below 0.8 with two negative ones.
    assert clipped.sum().item() == 3 * 2 + 3 * 2
    assert clipped.float().mean().item() == pytest.approx(12 / 55)


def test_the_first_update_has_a_ratio_of_exactly_one():
    logprobs = -5 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    advantages = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    loss, clipped = clipped_policy_loss(logprobs, logprobs.clone(), advantages, LOW, HIGH)
    assert torch.equal(loss, -advantages)
    assert not clipped.any()


def test_not_finite_values_stay_and_are_counted():
    logprobs = torch.tensor([-1.0, float("nan"), float("-inf"), -2.0])
    loss, _ = clipped_policy_loss(logprobs, torch.full((4,), -1.0), torch.ones(4), LOW, HIGH)
    assert torch.isnan(loss).tolist() == [False, True, False, False]
    assert count_non_finite(logprobs) == 2
    assert count_non_finite(logprobs, loss, torch.zeros(3)) == 3
    assert count_non_finite(torch.zeros(3)) == 0


def test_approximate_kl_by_hand():
    logprobs, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 - math.log(2), -1.0])
    assert approximate_kl(logprobs, old).tolist() == pytest.approx([1 - math.log(2), 0.0])


def test_approximate_kl_is_the_kl_on_average():
    old = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    new = (old + 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).log_softmax(0)
    values = approximate_kl(new, old)
    assert (values >= 0).all()
    assert (old.exp() * values).sum().item() == pytest.approx((old.exp() * (old - new)).sum().item(), rel=1e-12)

import itertools
import math

import pytest
import torch
from tests.support.algorithms import settings

from posttrain.rl.algorithm.clip.decoupled import token_losses
from posttrain.rl.algorithm.policy_gradient import approximate_kl

LOW, HIGH = 0.2, 0.28
RATIOS = (0.1, 0.5, 0.79, 0.81, 0.95, 1.0, 1.05, 1.27, 1.29, 1.5, 4.0)
ADVANTAGES = (-2.0, -0.3, 0.0, 0.3, 2.0)


def clipped_policy_loss(logprobs, old, advantages, low, high):
    bounds = settings(clip_ratio_low=low, clip_ratio_high=high)
    return token_losses(logprobs - old, logprobs, advantages, bounds)


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


def test_values_that_are_not_finite_stay():
    logprobs = torch.tensor([-1.0, float("nan"), float("-inf"), -2.0])
    loss, _ = clipped_policy_loss(logprobs, torch.full((4,), -1.0), torch.ones(4), LOW, HIGH)
    assert torch.isnan(loss).tolist() == [False, True, False, False]


def test_a_ratio_beyond_fp32_has_the_loss_and_the_gradient_of_every_clipped_ratio():
    """e^95 is 1.8e41. One token moved as it was asked to, of one nothing was asked: a prompt's, or equal rewards."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, clipped = clipped_policy_loss(logprobs, torch.full((2,), -96.0), torch.tensor([2.0, 0.0]), LOW, HIGH)
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx(-1.28 * 2), 0.0]
    assert clipped.tolist() == [True, False]
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_a_ratio_beyond_fp32_in_the_wrong_direction_is_an_infinite_loss():
    loss, clipped = clipped_policy_loss(torch.tensor([-1.0]), torch.tensor([-96.0]), torch.tensor([-0.1]), LOW, HIGH)
    assert loss.tolist() == [math.inf]
    assert clipped.tolist() == [False]


def test_an_infinite_old_log_probability_stays_an_error():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, torch.tensor([-math.inf]), torch.ones(1), LOW, HIGH)
    loss.sum().backward()
    assert torch.isnan(logprobs.grad).all()


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_where_no_ratio_overflows_the_bits_are_those_of_the_formula(spread):
    """Of the loss and of its gradient; the widest spread has ratios up to 1e37."""
    generator = torch.Generator().manual_seed(int(spread))
    old = -5 * torch.rand(100_000, generator=generator)
    moved = (old + spread * torch.randn(100_000, generator=generator)).clamp(old - 85, old + 85)
    advantages = torch.randn(100_000, generator=generator) * (torch.rand(100_000, generator=generator) > 0.1)
    ours, plain = (moved.clone().requires_grad_() for _ in range(2))
    loss, clipped = clipped_policy_loss(ours, old, advantages, LOW, HIGH)
    ratio = (plain - old).exp()
    objectives = -ratio * advantages, -ratio.clamp(1 - LOW, 1 + HIGH) * advantages
    expected = torch.maximum(*objectives)
    assert torch.equal(loss.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(clipped, objectives[1] > objectives[0])
    grown = torch.rand(100_000, generator=generator)
    (loss * grown).sum().backward()
    (expected * grown).sum().backward()
    assert torch.isfinite(expected).all()
    assert torch.equal(ours.grad.view(torch.int32), plain.grad.view(torch.int32))


def test_approximate_kl_by_hand():
    logprobs, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 - math.log(2), -1.0])
    assert approximate_kl(logprobs, old).tolist() == pytest.approx([1 - math.log(2), 0.0])


def test_approximate_kl_is_the_kl_on_average():
    old = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    new = (old + 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).log_softmax(0)
    values = approximate_kl(new, old)
    assert (values >= 0).all()
    assert (old.exp() * values).sum().item() == pytest.approx((old.exp() * (old - new)).sum().item(), rel=1e-12)

"""Parts that no library here has, against NumPy from their papers' equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.algorithms import objective, settings, token_batch


def test_tokens_of_one_micro_batch_share_what_it_weighs() -> None:
    lengths, micro_batches = [1, 3, 4, 2], [[0, 2], [1], [3]]
    weights = objective(loss_aggregation="micro_batch_mean").token_weights(lengths, micro_batches).numpy()
    losses = [np.arange(1.0, length + 1) * (i + 1) for i, length in enumerate(lengths)]
    means = [np.concatenate([losses[i] for i in indices]).mean() for indices in micro_batches]
    assert sum(weights[i] * losses[i].sum() for i in range(4)) == pytest.approx(np.mean(means), rel=1e-6)


def test_reinforce_plus_plus_with_baseline_whitens_over_tokens() -> None:
    from posttrain.rl.algorithm.advantage.reinforce_plus_plus_baseline import advantages

    random = np.random.default_rng(0)
    rewards, lengths = random.random((3, 4)).astype(np.float32), random.integers(1, 9, (3, 4))
    rewards[1] = 0.25
    difference = rewards - rewards.mean(axis=1, keepdims=True, dtype=np.float64)
    tokens = np.repeat(difference.ravel(), lengths.ravel())
    expected = (difference - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    ours = advantages(torch.tensor(rewards), torch.tensor(lengths), settings())
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-6)
    whitened = np.repeat(ours.numpy().ravel(), lengths.ravel())
    assert whitened.mean() == pytest.approx(0, abs=1e-6)
    assert whitened.std(ddof=1) == pytest.approx(1, rel=1e-5)
    by_hand = advantages(torch.tensor([[1.0, 0.0]]), torch.tensor([[1, 3]]), settings())
    assert by_hand.tolist() == [pytest.approx([1.5, -0.5], rel=1e-6)]


def test_reinforce_plus_plus_learns_nothing_from_rewards_that_are_all_equal() -> None:
    from posttrain.rl.algorithm.advantage.reinforce_plus_plus_baseline import advantages

    rewards = torch.full((2, 7), 0.1)
    assert not advantages(rewards, torch.arange(1, 15).reshape(2, 7), settings()).any()


LENGTHS = (2, 3, 1)
OLD = np.array([-1.0, -2.0, -1.5, -0.5, -3.0, -1.0])
ENGINE = OLD - np.log([0.4, 1.5, 0.9, 1.1, 1.3, 6.0])


@pytest.mark.parametrize(
    ("level", "reduce"), [("token", None), ("sequence", np.prod), ("geometric", lambda r: np.prod(r) ** (1 / len(r)))]
)
def test_a_mask_keeps_ratios_within_its_bounds_at_each_level(level: str, reduce) -> None:
    """And what it leaves out has no gradient, even where the policy's own ratio overflows."""
    low, high = 0.5, 5.0
    ratio = np.exp(OLD - ENGINE)
    rows = np.split(ratio, np.cumsum(LENGTHS)[:-1])
    at_level = ratio if reduce is None else np.concatenate([np.full(len(row), reduce(row)) for row in rows])
    factors = np.where((at_level >= low) & (at_level <= high), at_level, 0.0)
    logprobs = torch.tensor(OLD, dtype=torch.float32)
    logprobs[5] += 95
    logprobs.requires_grad_()
    old, engine = (torch.tensor(values, dtype=torch.float32) for values in (OLD, ENGINE))
    batch = token_batch(LENGTHS, [1.0, -0.5, -2.0], old, engine)
    masked = objective("icepop", correction_level=level)
    assert masked.needs.engine_logprobs
    losses, statistics = masked.token_losses(logprobs, batch)
    losses.sum().backward()
    expected = np.repeat([-1.0, 0.5, 2.0], LENGTHS) * factors
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-5)
    # A ratio of 1 has the loss as its gradient; the last token is left out at every level.
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(statistics["correction_mean"].numpy(), factors, rtol=1e-5)
    assert statistics["correction_zero_fraction"].tolist() == (factors == 0).tolist()
    assert 0 < (factors == 0).sum() < len(OLD)


def test_icepop_is_a_mask_of_tokens() -> None:
    icepop = settings("icepop")
    assert (icepop.correction_level, icepop.correction_low, icepop.correction_high) == ("token", 0.5, 5.0)


@pytest.mark.parametrize("clip", ["decoupled", "dual", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_infinite_ratio_that_is_clipped_has_no_gradient_through_it(clip: str, level: str) -> None:
    """e^95 overflows FP32. CISPO alone keeps a token's gradient, with the weight of its bound."""
    advantages = [2.0, -2.0] if clip == "dual" else [2.0, 0.0]
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = token_batch((1, 1), advantages, torch.full((2,), -96.0))
    losses, statistics = objective(clip=clip, ratio_level=level).token_losses(logprobs, batch)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    expected = [-1.28 * 2.0, 0.0] if clip == "cispo" else [0.0, 0.0]
    assert logprobs.grad.tolist() == pytest.approx(expected)
    assert statistics["clip_fraction"][0]


# ---- by hand, and far from where another reading of the equation gives the same ----


def test_rloo_by_hand() -> None:
    from posttrain.rl.algorithm.advantage.rloo import advantages

    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3], [2, -2 / 3, -2 / 3, -2 / 3]
    ours = advantages(rewards, torch.ones(2, 4), settings("rloo"))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6)
    assert advantages(torch.tensor([[5.0]]), torch.ones(1, 1), settings("rloo")).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [0.1, 0.3, -0.5]), ("sequence", [0.4, 0.4, -0.5]), ("geometric", [0.2, 0.2, -0.5])],
)
def test_levels_by_hand(level: str, expected: list[float]) -> None:
    """A prompt's token and padding belong to no response, whatever stands there."""
    from posttrain.rl.algorithm.objective import TokenBatch
    from posttrain.rl.algorithm.parts import load_part

    row = torch.tensor([99.0, 0.1, 0.3, -0.5, float("inf")])
    is_response = torch.tensor([False, True, True, True, False])
    batch = TokenBatch((3, 1, 1), is_response, row, row)
    combined = load_part("level", level).combine(row, batch)
    assert combined.shape == row.shape
    assert combined[is_response].tolist() == pytest.approx(expected)
    assert level == "token" or combined[[0, 4]].tolist() == pytest.approx([expected[0], 0.0])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_row_of_padding_has_a_gradient_of_zeros(level: str) -> None:
    """A rank without a sample goes backward as well: in its layers wait others."""
    from posttrain.rl.algorithm.objective import TokenBatch
    from posttrain.rl.algorithm.parts import load_part

    row, nothing = torch.ones(4, requires_grad=True), torch.zeros(4)
    combined = load_part("level", level).combine(row, TokenBatch((4,), nothing > 0, nothing, nothing))
    (gradient,) = torch.autograd.grad((combined * nothing).sum(), row)
    assert gradient.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "loss", "is_clipped"),
    [
        ("dual", 5.0, -1.0, 3.0, True),
        ("dual", 2.9, -1.0, 2.9, False),
        ("dual", 5.0, 1.0, -1.28, True),
        ("dual", 0.5, -1.0, 0.8, True),
        ("dual", 0.5, 1.0, -0.5, False),
        ("cispo", 1.5, 1.0, 2.56, True),
        ("cispo", 1.5, -1.0, -2.56, True),
        ("cispo", 0.5, 1.0, 1.6, True),
        ("cispo", 1.1, 1.0, 2.2, False),
    ],
)
def test_clips_by_hand(clip: str, ratio: float, advantage: float, loss: float, is_clipped: bool) -> None:
    from posttrain.rl.algorithm.parts import load_part

    logprobs = torch.tensor([-2.0])
    bounds = settings(clip=clip, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=3.0)
    log_ratio = torch.tensor([ratio]).log()
    losses, clipped = load_part("clip", clip).token_losses(log_ratio, logprobs, torch.tensor([advantage]), bounds)
    assert losses.item() == pytest.approx(loss, rel=1e-5)
    assert clipped.item() is is_clipped


def test_corrections_by_hand() -> None:
    from posttrain.rl.algorithm.correction import mask, truncate

    log_ratio = torch.tensor([0.4, 0.5, 1.5, 5.0, 9.0]).log()
    bounds = settings("icepop", correction_low=0.49, correction_high=5.01)
    assert truncate.factors(log_ratio, bounds).tolist() == pytest.approx([0.4, 0.5, 1.5, 5.0, 5.01])
    assert mask.factors(log_ratio, bounds).tolist() == pytest.approx([0.0, 0.5, 1.5, 5.0, 0.0])
    # exp(0) is 1 exactly: a ratio on a bound is kept.
    same, double = torch.zeros(1), torch.ones(1)
    assert mask.factors(same, settings("icepop", correction_low=1.0, correction_high=5.0)).item() == 1.0
    assert mask.factors(same, settings("icepop", correction_low=0.5, correction_high=1.0)).item() == 1.0
    assert mask.factors(double, settings("icepop", correction_low=0.5, correction_high=1.0)).item() == 0.0


def test_denominators_by_hand() -> None:
    from posttrain.rl.algorithm.aggregation import token_weights

    def denominators(name: str, micro_batches: list[list[int]]) -> list[float]:
        return (1 / token_weights(name, [1, 3, 4], micro_batches, longest=10)).tolist()

    together, apart = [[0, 1], [2]], [[0], [1, 2]]
    assert denominators("micro_batch_mean", together) == pytest.approx([8, 8, 8])
    assert denominators("micro_batch_mean", apart) == pytest.approx([2, 14, 14])
    # A micro-batch without samples has a mean of 0, and counts like the others.
    assert denominators("micro_batch_mean", [[0], [1, 2], []]) == pytest.approx([3, 21, 21])
    for name, expected in (("sample_mean", [3, 9, 12]), ("token_mean", [8, 8, 8]), ("constant", [30, 30, 30])):
        assert denominators(name, together) == denominators(name, apart) == pytest.approx(expected)
    assert token_weights("sample_mean", [1, 0], together[:1], longest=10).tolist() == [1 / 2, 0], "one does not count"

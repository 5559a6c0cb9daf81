"""Parts that no library here has, against NumPy from their papers' equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.algorithms import objective, settings


def test_tokens_of_one_micro_batch_share_what_it_weighs() -> None:
    lengths, micro_batches = [1, 3, 4, 2], [[0, 2], [1], [3]]
    weights = objective(loss_aggregation="micro_batch_mean").token_weights(lengths, micro_batches).numpy()
    losses = [np.arange(1.0, length + 1) * (i + 1) for i, length in enumerate(lengths)]
    means = [np.concatenate([losses[i] for i in indices]).mean() for indices in micro_batches]
    assert sum(weights[i] * losses[i].sum() for i in range(4)) == pytest.approx(np.mean(means), rel=1e-6)


def test_reinforce_plus_plus_with_baseline_whitens_over_tokens() -> None:
    from posttrain.algorithm.advantage.reinforce_plus_plus_baseline import advantages

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
    from posttrain.algorithm.advantage.reinforce_plus_plus_baseline import advantages

    rewards = torch.full((2, 7), 0.1)
    assert not advantages(rewards, torch.arange(1, 15).reshape(2, 7), settings()).any()

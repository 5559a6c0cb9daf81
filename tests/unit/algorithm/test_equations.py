"""Parts that no library here has, against NumPy from their papers' equations."""

from __future__ import annotations

import numpy as np
import pytest
from tests.algorithms import objective


def test_tokens_of_one_micro_batch_share_what_it_weighs() -> None:
    lengths, micro_batches = [1, 3, 4, 2], [[0, 2], [1], [3]]
    weights = objective(loss_aggregation="micro_batch_mean").token_weights(lengths, micro_batches).numpy()
    losses = [np.arange(1.0, length + 1) * (i + 1) for i, length in enumerate(lengths)]
    means = [np.concatenate([losses[i] for i in indices]).mean() for indices in micro_batches]
    assert sum(weights[i] * losses[i].sum() for i in range(4)) == pytest.approx(np.mean(means), rel=1e-6)

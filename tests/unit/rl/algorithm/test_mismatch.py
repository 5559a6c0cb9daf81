import math

import numpy as np
import pytest
import torch

from posttrain.rl.algorithm.mismatch import compare_logprobs


def test_by_hand():
    # d = trainer - engine = (0, ln 2): the trainer finds the second token twice as likely as the engine did.
    result = compare_logprobs(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 - math.log(2)]))
    assert result.abs_diff_mean == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert result.abs_diff_max == pytest.approx(math.log(2), rel=1e-6)
    assert result.kl_k3 == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)
    assert result.effective_sample_size == pytest.approx((1 + 2) ** 2 / (2 * (1 + 4)), rel=1e-6)


def test_agreement_is_exactly_zero_and_one():
    logprobs = -torch.rand(50, generator=torch.Generator().manual_seed(0))
    result = compare_logprobs(logprobs, logprobs.clone())
    assert (result.abs_diff_mean, result.abs_diff_max, result.kl_k3, result.effective_sample_size) == (0, 0, 0, 1)


def test_the_sign_of_the_difference_matters():
    near, far = torch.tensor([-1.0]), torch.tensor([-2.0])
    assert compare_logprobs(near, far).kl_k3 == pytest.approx(math.e - 2, rel=1e-6)
    assert compare_logprobs(far, near).kl_k3 == pytest.approx(math.exp(-1), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_numpy(dtype):
    """In FP64, whatever comes in."""
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1.0, 1000).astype(dtype)
    trainer = (engine + rng.normal(0, 0.2, 1000)).astype(dtype)
    result = compare_logprobs(torch.tensor(trainer), torch.tensor(engine))
    d = trainer.astype(np.float64) - engine.astype(np.float64)
    assert result.abs_diff_mean == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert result.abs_diff_max == pytest.approx(np.abs(d).max(), rel=1e-12)
    assert result.kl_k3 == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-12)
    assert result.effective_sample_size == pytest.approx(np.exp(d).sum() ** 2 / (1000 * np.exp(2 * d).sum()), rel=1e-12)


def test_k3_estimates_the_kl_of_engine_and_trainer():
    engine = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    noise = 0.5 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = (engine + noise).log_softmax(0)
    tokens = torch.multinomial(engine.exp(), 200_000, True, generator=torch.Generator().manual_seed(2))
    exact = (engine.exp() * (engine - trainer)).sum().item()
    assert compare_logprobs(trainer[tokens], engine[tokens]).kl_k3 == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("trainer", "engine"), [([], []), ([-1.0], [-1.0, -2.0]), ([-1.0, float("nan")], [-1.0, -1.0])]
)
def test_wrong_input_is_refused(trainer, engine):
    with pytest.raises(ValueError, match="log-probabilities"):
        compare_logprobs(torch.tensor(trainer), torch.tensor(engine))

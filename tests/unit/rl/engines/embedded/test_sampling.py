import math

import numpy as np
import pytest
import torch

from posttrain.rl.engines.embedded.sampling import RowSampler, inverse_cdf, nucleus


def test_the_first_token_whose_cumulative_probability_exceeds_u():
    logits = torch.tensor([[math.log(0.25), -math.inf, math.log(0.75)]]).expand(5, 3)
    uniforms = torch.tensor([0.0, 0.2, 0.2500001, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(logits, uniforms).tolist() == [0, 0, 2, 2, 2]


def test_u_next_to_one_never_leaves_the_vocabulary_nor_takes_an_impossible_token():
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, -1] = -1e30
    tokens = inverse_cdf(logits, torch.full((2000,), 1 - 2**-53, dtype=torch.float64))
    assert tokens.max() < 49


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    sampler = RowSampler(range(20000), [0.7] * 20000)
    tokens, _ = sampler.sample(logits.expand(20000, 4))
    expected = torch.softmax(logits / 0.7, 0)
    counts = torch.bincount(tokens, minlength=4) / 20000
    # 5 standard deviations of a frequency of 20000 draws
    assert torch.all((counts - expected).abs() < 5 * (expected * (1 - expected) / 20000).sqrt())


def test_logprobs_are_those_of_the_tempered_distribution():
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = RowSampler([1, 2, 3], [1.0, 0.5, 2.0]).sample(logits)
    for row, temperature in enumerate([1.0, 0.5, 2.0]):
        scaled = logits[row].double().numpy() / temperature
        expected = scaled - np.log(np.exp(scaled).sum())
        assert logprobs[row].item() == pytest.approx(expected[tokens[row]], abs=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_the_lower_of_equal_ones():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(4, 3)
    kept = nucleus(logits, torch.tensor([0.6, 0.49, 1.0, 1e-6], dtype=torch.float64)).isfinite()
    assert kept.tolist() == [[False, True, True], [False, True, False], [True] * 3, [False, True, False]]
    equal = nucleus(torch.zeros(1, 4), torch.tensor([0.5], dtype=torch.float64)).isfinite()
    assert equal.tolist() == [[True, True, False, False]]


def test_top_p_agrees_with_transformers_and_leaves_log_probabilities_alone():
    from transformers import TopPLogitsWarper

    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(3)) * 3
    kept = nucleus(logits, torch.full((300,), 0.8, dtype=torch.float64)).isfinite()
    assert torch.equal(kept, TopPLogitsWarper(0.8)(None, logits.double()).isfinite())
    tokens, logprobs = RowSampler(range(300), [1.0] * 300, [0.8] * 300).sample(logits)
    assert kept.gather(1, tokens[:, None]).all()
    assert torch.equal(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])


def test_a_row_without_top_p_samples_the_same_beside_one_with_it():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(4)).expand(2, 40)
    alone, beside = RowSampler([7], [1.0]), RowSampler([7, 8], [1.0, 1.0], [1.0, 0.2])
    for _ in range(20):
        assert alone.sample(logits[:1])[0][0] == beside.sample(logits)[0][0]


def test_temperature_zero_is_greedy_and_reports_temperature_one():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, logprobs = RowSampler([0], [0.0]).sample(logits)
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits[0], 0)[1].item())


def test_a_rows_numbers_depend_on_its_seed_alone():
    logits = torch.zeros(4, 1000)
    together, alone = RowSampler([7, 8, 9, 10], [1.0] * 4), RowSampler([9], [1.0])
    first = [together.sample(logits)[0].tolist() for _ in range(2)]
    together.keep([2, 0])
    rest = [together.sample(logits[:2])[0].tolist() for _ in range(2)]
    of_nine = [alone.sample(logits[:1])[0].item() for _ in range(4)]
    assert of_nine == [first[0][2], first[1][2], rest[0][0], rest[1][0]]
    assert len(set(first[0])) > 1


def test_logits_that_are_no_numbers_are_an_error():
    with pytest.raises(FloatingPointError, match="not finite"):
        RowSampler([0], [1.0]).sample(torch.tensor([[0.0, float("nan")]]))

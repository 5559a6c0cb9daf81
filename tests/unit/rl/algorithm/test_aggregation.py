import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.algorithms import objective
from tests.support.algorithms import settings as algorithm

from posttrain.rl.algorithm.clip.decoupled import token_losses
from posttrain.rl.batching.packed_batch import PackedBatch, build_packed_batch
from posttrain.rl.batching.packing import pack
from posttrain.types import Trajectory

AGGREGATIONS = ("sample_mean", "token_mean", "constant")


def token_weights(lengths: list[int], aggregation: str, longest: int) -> torch.Tensor:
    """Of one micro-batch that holds all samples."""
    return objective(longest=longest, loss_aggregation=aggregation).token_weights(lengths, [range(len(lengths))])


def test_hand_table():
    assert token_weights([1, 3], "sample_mean", 4).tolist() == pytest.approx([1 / 2, 1 / 6])
    assert token_weights([1, 3], "token_mean", 4).tolist() == pytest.approx([1 / 4, 1 / 4])
    assert token_weights([1, 3], "constant", 4).tolist() == pytest.approx([1 / 8, 1 / 8])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_fp32_rounded_once(aggregation):
    """A batch of 2^24 + 1 tokens: FP32 cannot hold that number, but the weight."""
    lengths = np.array([2**24, 1])
    exact = {
        "sample_mean": 1 / (2 * lengths),
        "token_mean": np.full(2, 1 / (2**24 + 1)),
        "constant": np.full(2, 1 / (2 * (2**24 + 1))),
    }[aggregation]
    weights = token_weights(lengths.tolist(), aggregation, longest=2**24 + 1)
    assert weights.dtype == torch.float32
    assert weights.tolist() == exact.astype(np.float32).tolist()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_definitions(aggregation):
    losses = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0]), torch.tensor([0.5, -1.0])]
    weights = token_weights([3, 1, 2], aggregation, longest=8)
    weighted = sum((weight * loss).sum() for weight, loss in zip(weights, losses, strict=True))
    expected = {
        "sample_mean": torch.stack([loss.mean() for loss in losses]).mean(),
        "token_mean": torch.cat(losses).mean(),
        "constant": torch.cat(losses).sum() / (3 * 8),
    }[aggregation]
    assert weighted.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_response_that_does_not_count_has_no_weight():
    """As in TRL, the mean over samples is still divided by all of them."""
    assert token_weights([2, 0], "sample_mean", 4).tolist() == [1 / 4, 0]
    assert token_weights([2, 0], "token_mean", 4).tolist() == [1 / 2, 0]
    assert token_weights([2, 0], "constant", 4).tolist() == [1 / 8, 0]
    assert token_weights([0, 0], "token_mean", 4).tolist() == [0, 0]


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[Trajectory], int, int, int]:
    ranks = draw(st.sampled_from((1, 2, 4)))
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=4, max_size=12))
    lengths = lengths[: len(lengths) // ranks * ranks]  # the configuration sees to it
    samples = [
        Trajectory.of_response((1,) * prompt, (2,) * response, (-1.0,) * response, 0, prompt_id=i, reward=0.0)
        for i, (prompt, response) in enumerate(lengths)
    ]
    return samples, draw(st.integers(15, 60)), ranks, draw(st.sampled_from((1, 2, 4)))


def _token_values(samples: list[Trajectory], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s.num_sampled, generator=generator, dtype=torch.float64) for s in samples]


def _place(batch: PackedBatch, values: list[torch.Tensor]) -> torch.Tensor:
    """Return values per response token in the row of a micro-batch."""
    row = torch.zeros(len(batch.tokens), dtype=torch.float64)
    row[batch.loss_mask > 0] = torch.cat([row[:0], *(values[i] for i in batch.trajectory_indices)])  # padding has none
    return row


def _split_loss(
    samples: list[Trajectory], rows: list[PackedBatch], parameter: torch.Tensor, aggregation: str, cp_size: int
) -> torch.Tensor:
    """Add up the loss over micro-batches, ranks and context-parallel shares, as the trainer does."""
    weights = token_weights([s.num_sampled for s in samples], aggregation, longest=10).double()
    advantages = torch.linspace(-1, 1, len(samples), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    features, old = _token_values(samples, 0), _token_values(samples, 1)
    for batch in rows:
        logprobs = -1 + 0.3 * parameter * _place(batch, features)
        log_ratio = logprobs - (-1 + 0.1 * _place(batch, old))
        losses, _ = token_losses(log_ratio, logprobs, batch.spread(advantages), algorithm())
        weighted = losses * batch.spread(weights)
        # Each context-parallel rank holds some positions of the row and adds only those.
        total = total + sum(weighted[rank::cp_size].sum() for rank in range(cp_size))
    return total


@given(_batches(), st.sampled_from(AGGREGATIONS))
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_do_not_depend_on_the_split(case, aggregation):
    samples, max_tokens, num_ranks, cp_size = case
    whole = [build_packed_batch(samples, range(len(samples)))]
    lengths = [s.num_tokens for s in samples]
    plan = pack(lengths, lengths, max_tokens, num_ranks)
    split = [build_packed_batch(samples, indices, multiple_of=2 * cp_size) for rank in plan for indices in rank]
    results = []
    for rows, cp in ((whole, 1), (split, cp_size)):
        parameter = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        loss = _split_loss(samples, rows, parameter, aggregation, cp)
        loss.backward()
        results.append((loss.item(), parameter.grad.item()))
    assert results[1] == pytest.approx(results[0], rel=1e-10, abs=1e-13)

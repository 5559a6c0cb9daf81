from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trajectories import trajectories

from posttrain.rl.batching.packed_batch import build_packed_batch
from posttrain.types import Trajectory


def _sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> Trajectory:
    return Trajectory.of_response(prompt, response, (-1.0,) * len(response), 0, prompt_id=0, reward=0.0)


SAMPLES = [_sample((5, 9), (7, 1)), _sample((4,), (8,)), _sample((6, 6, 6), (2, 3, 1))]


def test_two_sequences_by_hand():
    batch = build_packed_batch(SAMPLES, [1, 0], multiple_of=4)
    assert batch.tokens.tolist() == [4, 8, 5, 9, 7, 1, 0, 0]
    assert batch.targets.tolist() == [8, 0, 9, 7, 1, 0, 0, 0]
    assert batch.loss_mask.tolist() == [1, 0, 0, 1, 1, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert batch.trajectory_indices == (1, 0)
    assert (batch.num_padding, batch.padding_fraction) == (2, 0.25)


def test_the_end_token_is_trained_and_an_answer_that_was_cut_has_none():
    """END is 1. What follows the last token of a cut answer is nothing, be it in a row of its own or amid others."""
    ended, cut = _sample((5, 9), (7, 1)), replace(_sample((4, 6), (7, 8)), finish_reason="length")
    for samples, trained in (([ended, cut], [7, 1, 7, 8]), ([cut, ended], [7, 8, 7, 1]), ([cut], [7, 8])):
        batch = build_packed_batch(samples, range(len(samples)), multiple_of=8)
        assert batch.targets[batch.loss_mask > 0].tolist() == trained
        last = batch.cu_seqlens[1 : len(samples) + 1] - 1
        assert not batch.loss_mask[last].any()


def test_types():
    batch = build_packed_batch(SAMPLES, [0, 2], multiple_of=8)
    assert {batch.tokens.dtype, batch.targets.dtype, batch.position_ids.dtype} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.float32


def test_no_padding_no_extra_sequence():
    batch = build_packed_batch(SAMPLES, [0, 1, 2], multiple_of=4)
    assert len(batch.tokens) == 12
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 12]
    assert (batch.num_padding, batch.padding_fraction) == (0, 0.0)


def test_without_a_multiple_nothing_is_padded():
    batch = build_packed_batch([_sample((5, 9), (7,))], [0])
    assert batch.tokens.tolist() == [5, 9, 7]
    assert batch.cu_seqlens.tolist() == [0, 3]


def test_a_row_without_samples_is_padding_alone():
    batch = build_packed_batch(SAMPLES, [], multiple_of=4)
    assert batch.tokens.tolist() == [0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert (batch.trajectory_indices, batch.num_padding, batch.loss_mask.sum()) == ((), 4, 0)
    assert batch.spread(torch.tensor([10.0, 20.0, 30.0])).tolist() == [0, 0, 0, 0]
    assert batch.response_values(torch.arange(4)) == {}


def test_each_sequence_is_padded_where_the_layout_asks_for_it():
    batch = build_packed_batch(SAMPLES, [0, 2, 1], multiple_of=8, sequence_multiple_of=4)
    assert batch.tokens.tolist() == [5, 9, 7, 1, 6, 6, 6, 2, 3, 1, 0, 0, 4, 8, 0, 0]
    assert batch.targets.tolist() == [9, 7, 1, 0, 6, 6, 2, 3, 1, 0, 0, 0, 8, 0, 0, 0]
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert batch.num_padding == 4
    assert {i: v.tolist() for i, v in batch.response_values(batch.tokens).items()} == {0: [9, 7], 2: [6, 2, 3], 1: [4]}


def test_spread_keeps_the_precision():
    batch = build_packed_batch(SAMPLES, [1], multiple_of=4)
    assert batch.spread(torch.tensor([1.0, 0.1, 2.0], dtype=torch.float64)).tolist() == [0.1, 0, 0, 0]


def test_spread_puts_a_value_of_each_sample_on_its_response_tokens():
    batch = build_packed_batch(SAMPLES, [1, 0], multiple_of=4)
    assert batch.spread(torch.tensor([10.0, 20.0, 30.0])).tolist() == [20, 0, 0, 10, 10, 0, 0, 0]


def test_response_values_are_where_the_responses_are_predicted():
    batch = build_packed_batch(SAMPLES, [2, 1], multiple_of=5)
    values = batch.response_values(torch.arange(len(batch.tokens)))
    assert {index: row.tolist() for index, row in values.items()} == {2: [2, 3, 4], 1: [6]}


def test_tokens_between_sampled_stretches_are_read_but_not_learned():
    turns = Trajectory(0, 0, (5, 9, 7, 1, 4, 4, 3), (0, 0, 1, 1, 0, 0, 1), (), (), "stop", 0.0)
    batch = build_packed_batch([SAMPLES[0], turns], [1, 0], multiple_of=4, sequence_multiple_of=4)
    assert batch.tokens[:8].tolist() == [5, 9, 7, 1, 4, 4, 3, 0]
    assert batch.targets[:8].tolist() == [9, 7, 1, 4, 4, 3, 0, 0]
    assert batch.loss_mask[:8].tolist() == [0, 1, 1, 0, 0, 1, 0, 0]
    assert batch.spread(torch.tensor([2.0, 3.0]))[:8].tolist() == [0, 3, 3, 0, 0, 3, 0, 0]
    assert batch.response_values(batch.targets)[1].tolist() == [7, 1, 3]


@given(st.lists(trajectories(), min_size=1, max_size=8), st.randoms(use_true_random=False), st.integers(1, 16))
@settings(max_examples=150, deadline=None)
def test_everything_comes_back_out(samples, rng, multiple_of):
    indices = list(range(len(samples)))
    rng.shuffle(indices)
    batch = build_packed_batch(samples, indices, multiple_of)
    assert len(batch.tokens) % multiple_of == 0
    assert batch.num_padding < multiple_of
    # What the loss sees of the targets is exactly what the model sampled.
    found = batch.response_values(batch.targets)
    assert {i: tuple(row.tolist()) for i, row in found.items()} == {i: s.sampled_tokens for i, s in enumerate(samples)}
    bounds = batch.cu_seqlens.tolist()
    for place, index in enumerate(indices):
        row = slice(bounds[place], bounds[place + 1])
        sequence = samples[index].tokens
        assert tuple(batch.tokens[row].tolist()) == sequence
        assert batch.position_ids[row].tolist() == list(range(len(sequence)))
        assert tuple(batch.targets[row].tolist()) == (*sequence[1:], 0)
    assert batch.loss_mask.sum().item() == sum(s.num_sampled for s in samples)
    padding = slice(len(batch.tokens) - batch.num_padding, None)
    assert not batch.tokens[padding].any()
    assert not batch.loss_mask[padding].any()

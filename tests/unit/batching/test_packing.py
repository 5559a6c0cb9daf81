import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.batching.packing import pack
from posttrain.errors import ConfigError

MAX_TOKENS = 100


def _tokens(lengths: list[int], indices: list[int]) -> int:
    return sum(lengths[i] for i in indices)


def test_by_hand():
    # First-fit decreasing with room for 10: 7+3, 6+4, 5+5 fill three bins exactly.
    assert pack([3, 7, 5, 4, 6, 5], 10) == [[[0, 1], [2, 5], [3, 4]]]


def test_heaviest_bins_are_split_until_every_rank_has_as_many():
    # One bin of 8 + 1 + 1 for two ranks: cut into 8 and 1 + 1.
    assert pack([8, 1, 1], 10, num_ranks=2) == [[[0]], [[1, 2]]]
    # Three bins (10, 10, 10) for two ranks: the first becomes 5 and 5.
    assert pack([5, 5, 10, 10], 10, num_ranks=2) == [[[2], [0]], [[3], [1]]]


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "expected"),
    [
        # Bins 4+3+1 and 3+2+1+1: the heavier one, of 8, is cut into 4 and 3+1.
        ([4, 2, 1, 1, 3, 3, 1], 3, [[[1, 3, 5, 6]], [[0]], [[2, 4]]]),
        # Two bins of 4+4: the one with the first sequence is cut.
        ([4, 4, 4, 4], 3, [[[2, 3]], [[0]], [[1]]]),
        # Bins 6+2 and 5+3 weigh the same, too; the sequence of 5 comes before that of 6.
        ([5, 6, 2, 3], 3, [[[1, 2]], [[0]], [[3]]]),
        # One bin 2+1+1, cut into 2 and 1+1.
        ([2, 1, 1], 2, [[[0]], [[1, 2]]]),
    ],
)
def test_which_bin_is_split_and_where(lengths, num_ranks, expected):
    assert pack(lengths, 8, num_ranks) == expected


def test_an_over_long_sequence_is_named():
    with pytest.raises(ConfigError) as caught:
        pack([3, 4, 11, 5], 10)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trainer.max_tokens_per_gpu", "10")
    assert problem.allowed == "at least 11, the length of sequence 2"
    assert problem.remedy.startswith("raise the budget")


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "wanted"), [([5], 2, 2), ([], 1, 1), ([10, 10, 10], 2, 4), ([6, 6, 6, 6, 6], 3, 6)]
)
def test_too_few_sequences_for_the_ranks_are_refused(lengths, num_ranks, wanted):
    with pytest.raises(ConfigError) as caught:
        pack(lengths, 10, num_ranks)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("training.global_batch_size", str(len(lengths)))
    assert problem.allowed.startswith(f"at least {wanted}: {num_ranks} data-parallel ranks")
    assert problem.remedy.startswith("raise the batch")


@given(st.lists(st.integers(1, MAX_TOKENS), min_size=16, max_size=60), st.sampled_from((1, 2, 3, 4, 8)))
@settings(max_examples=200, deadline=None)
def test_every_sequence_once_under_the_cap_and_equal_counts(lengths, num_ranks):
    try:
        plan = pack(lengths, MAX_TOKENS, num_ranks)
    except ConfigError:
        # Only when even one sequence per bin leaves some rank without its last micro-batch.
        assert len(lengths) < math.ceil(_first_fit_bins(lengths) / num_ranks) * num_ranks
        return
    assert sorted(i for rank in plan for bin_ in rank for i in bin_) == list(range(len(lengths)))
    assert all(bin_ and _tokens(lengths, bin_) <= MAX_TOKENS for rank in plan for bin_ in rank)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert pack(lengths, MAX_TOKENS, num_ranks) == plan
    assert sum(map(len, plan)) < _first_fit_bins(lengths) + num_ranks


def _first_fit_bins(lengths: list[int]) -> int:
    """Count the bins of a plain first-fit decreasing."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for place, free in enumerate(room):
            if free >= length:
                room[place] -= length
                break
        else:
            room.append(MAX_TOKENS - length)
    return len(room)


@given(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_all_bins_but_one_are_more_than_half_full(lengths):
    # Two bins of at most half would have been one: so there are fewer than 2 * total / budget + 1.
    loads = sorted(_tokens(lengths, bin_) for bin_ in pack(lengths, MAX_TOKENS)[0])
    assert all(load > MAX_TOKENS / 2 for load in loads[1:])
    assert len(loads) < 2 * sum(lengths) / MAX_TOKENS + 1


@given(st.lists(st.integers(1, MAX_TOKENS), min_size=24, max_size=80), st.sampled_from((2, 4)))
@settings(max_examples=200, deadline=None)
def test_ranks_are_balanced_by_tokens(lengths, num_ranks):
    try:
        plan = pack(lengths, MAX_TOKENS, num_ranks)
    except ConfigError:
        return
    loads = [sum(_tokens(lengths, bin_) for bin_ in rank) for rank in plan]
    # Largest first: no two ranks are further apart than the largest micro-batch.
    assert max(loads) - min(loads) <= max(_tokens(lengths, bin_) for rank in plan for bin_ in rank)

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rl.batching.packing import pack

MAX_TOKENS = 100


def _sum(values, indices) -> float:
    return sum(values[i] for i in indices)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "expected"),
    [
        # First-fit decreasing with room for 10 needs three bins: 7+3, 6+4, 5+5; largest first into the lightest gives
        # 7, 6, 5, then 5 to 5, 4 to 6, 3 to 7.
        ([3, 7, 5, 4, 6, 5], 1, [[[0, 1], [3, 4], [2, 5]]]),
        # 8 to one rank, 1 and 1 to the other.
        ([8, 1, 1], 2, [[[0]], [[1, 2]]]),
        # 10 and 5 for each rank, in two bins each.
        ([5, 5, 10, 10], 2, [[[2], [0]], [[3], [1]]]),
        # 6 each; the second rank's 3+3 fits into one bin as the first's does.
        ([6, 3, 3], 2, [[[0]], [[1, 2]]]),
        # 9 and 8 share no bin: the second rank, whose 5 does, cuts nothing and runs an empty one.
        ([9, 12, 8], 2, [[[1], []], [[0], [2]]]),
        # Fewer samples than ranks, and none.
        ([4], 3, [[[0]], [[]], [[]]]),
        ([], 2, [[[]], [[]]]),
    ],
)
def test_by_hand(lengths, num_ranks, expected):
    assert pack(lengths, lengths, 10, num_ranks) == expected


def test_a_schedule_that_takes_several_at_a_time_gets_a_multiple_of_them():
    # Two bins would do; the room of four is used.
    assert pack([5, 5, 5, 5], [5, 5, 5, 5], 10, multiple_of=4) == [[[0], [1], [2], [3]]]
    # Three are needed, and the fourth is empty where no sequence is left for it.
    assert pack([8, 8, 8], [8, 8, 8], 10, multiple_of=2) == [[[0], [1], [2], []]]
    assert pack([8], [8], 10, num_ranks=2, multiple_of=2) == [[[0], []], [[], []]]


def test_ranks_get_the_same_cost_not_the_same_tokens():
    # One sequence of 4 costs 16, as much as four of 2.
    lengths = [2, 2, 4, 2, 2]
    assert pack(lengths, [n**2 for n in lengths], 8, num_ranks=2) == [[[2]], [[0, 1, 3, 4]]]
    # So do the micro-batches of a rank, where the budget allows it; the most expensive comes first.
    assert pack([6, 3, 3, 3], [36, 9, 9, 9], 9) == [[[0], [1, 2, 3]]]
    assert pack([5, 1, 4], [25, 1, 16], 6) == [[[0], [1, 2]]]


def test_a_sequence_over_the_budget_has_a_micro_batch_of_its_own():
    assert pack([3, 11, 4, 5], [3, 11, 4, 5], 10) == [[[1], [0, 2], [3]]]


def test_where_balance_has_no_room_the_fitted_bins_stay():
    # Costs say that 1 and 1 and 1 are the heavy ones: spread, they leave no bin with room for 9.
    assert pack([1, 1, 1, 9, 8], [5, 4, 3, 2, 1], 10) == [[[1, 2, 4], [0, 3]]]


SEQUENCES = st.lists(st.tuples(st.integers(1, MAX_TOKENS + 20), st.integers(1, 1000)), max_size=60)


@given(SEQUENCES, st.sampled_from((1, 2, 3, 4, 8)))
@settings(max_examples=300, deadline=None)
def test_every_sequence_once_under_the_cap_and_equal_counts(sequences, num_ranks):
    lengths, costs = [length for length, _ in sequences], [cost for _, cost in sequences]
    plan = pack(lengths, costs, MAX_TOKENS, num_ranks)
    check(plan, lengths, MAX_TOKENS, num_ranks)
    assert pack(lengths, costs, MAX_TOKENS, num_ranks) == plan
    loads = [sum(_sum(costs, bin_) for bin_ in rank) for rank in plan]
    # Largest first: no two ranks are further apart than the largest sequence.
    assert max(loads) - min(loads) <= max(costs, default=0)
    for rank in plan:
        by_cost = [_sum(costs, bin_) for bin_ in rank]
        assert by_cost == sorted(by_cost, reverse=True) or not all(rank)


def check(plan, lengths, max_tokens, num_ranks):
    assert sorted(i for rank in plan for bin_ in rank for i in bin_) == list(range(len(lengths)))
    assert all(len(bin_) <= 1 or _sum(lengths, bin_) <= max_tokens for rank in plan for bin_ in rank)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    # No more micro-batches than the fullest rank needs: two that are half full at most would have been one.
    fullest = max(sum(lengths[i] for bin_ in rank for i in bin_) for rank in plan)
    assert len(plan[0]) == 1 or len(plan[0]) < 2 * fullest / max_tokens + 1


@pytest.mark.faults("slow")
def test_the_cap_holds_in_ten_thousand_batches():
    source = random.Random(7)
    for _ in range(10_000):
        num_ranks, budget = source.choice((1, 2, 8, 16, 64)), source.choice((4096, 16384, 32768))
        lengths = [min(int(source.lognormvariate(8, 1.2)) + 1, budget) for _ in range(source.choice((16, 64, 256)))]
        check(pack(lengths, [n + n**2 / 4096 for n in lengths], budget, num_ranks), lengths, budget, num_ranks)

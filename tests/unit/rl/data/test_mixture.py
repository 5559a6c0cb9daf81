import itertools
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.data import Data, DataSource
from posttrain.rl.data.mixture import MixedOrder, PromptMix, PromptOrder, _whole
from posttrain.types import Prompt


def test_known_orders():
    """Written down once: another order would silently change every resumed run."""
    assert PromptOrder(5, 7).take(0, 12) == [1, 3, 4, 0, 2, 3, 2, 4, 0, 1, 1, 4]
    assert PromptOrder(5, 8).take(0, 5) == [2, 0, 1, 4, 3]
    mixed = MixedOrder([5, 3, 4], [0.5, 0.3, 0.2], 7).take(0, 10)
    assert [source for source, _ in mixed] == [2, 0, 1, 0, 2, 0, 1, 0, 1, 0]
    assert [place for source, place in mixed if source == 0] == [1, 3, 4, 0, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 100), min_size=1, max_size=6),
    st.integers(0, 500),
)
def test_any_cut_into_steps_gives_the_same_prompts(num_prompts, seed, steps, start):
    whole = PromptOrder(num_prompts, seed).take(start, sum(steps))
    order, taken, cursor = PromptOrder(num_prompts, seed), [], start
    for count in steps:
        taken += order.take(cursor, count)
        cursor += count
    assert taken == whole
    backwards = PromptOrder(num_prompts, seed)
    backwards.take(10_000, 3)
    assert backwards.take(start, sum(steps)) == whole


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 100])
def test_each_epoch_takes_each_prompt_once_also_when_a_step_is_larger(num_prompts):
    taken = PromptOrder(num_prompts, 1).take(0, 7 * num_prompts)
    for epoch in range(7):
        assert sorted(taken[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))
    assert Counter(taken) == dict.fromkeys(range(num_prompts), 7)


def test_epochs_and_seeds_differ():
    epochs = [tuple(PromptOrder(50, seed).take(epoch * 50, 50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(epochs)) == 4


def test_the_global_random_state_is_neither_read_nor_changed():
    random.seed(1)
    first, state = PromptOrder(20, 3).take(0, 20), random.getstate()
    random.seed(2)
    assert PromptOrder(20, 3).take(0, 20) == first
    random.seed(1)
    assert random.getstate() == state


def test_no_prompts_are_no_order():
    with pytest.raises(AssertionError):
        PromptOrder(0, 1)
    assert PromptOrder(3, 1).take(5, 0) == []


# ---- several sources ----

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)
WEIGHT = st.one_of(st.integers(1, 50), st.floats(0.01, 10))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**32), WEIGHT, st.integers(0, 400))
def test_one_source_has_the_order_that_it_has_alone(size, seed, weight, start):
    alone = PromptOrder(size, seed).take(start, 60)
    assert MixedOrder([size], [weight], seed).take(start, 60) == [(0, place) for place in alone]


@settings(max_examples=50, deadline=None)
@given(st.data(), SIZES, st.integers(0, 2**32), st.integers(0, 10**15))
def test_a_mixture_goes_on_anywhere_as_if_it_had_not_stopped(data, sizes, seed, start):
    weights = data.draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)))
    small = start % 1000
    whole = MixedOrder(sizes, weights, seed).take(0, small + 40)
    assert MixedOrder(sizes, weights, seed).take(small, 40) == whole[small:]
    # Far out, too: neighbours agree on how many prompts each source gave.
    order = MixedOrder(sizes, weights, seed)
    given_before: dict[int, int] = {}
    for cursor in range(start, start + 30):
        source, number = order.locate(cursor)
        assert given_before.setdefault(source, number) == number
        given_before[source] += 1


@settings(max_examples=50, deadline=None)
@given(st.data(), SIZES, st.integers(0, 2**32))
def test_each_epoch_of_each_source_takes_each_of_its_prompts_once(data, sizes, seed):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    taken = MixedOrder(sizes, weights, seed).take(0, 400)
    for source, size in enumerate(sizes):
        places = [place for of, place in taken if of == source]
        for begin in range(0, len(places) - size + 1, size):
            assert sorted(places[begin : begin + size]) == list(range(size))


def _largest_error(weights, seed, window, num_prompts):
    """Return by how many prompts a stretch of a run differs from the shares at most."""
    order, total = MixedOrder([1] * len(weights), weights, seed), sum(map(Fraction, weights))
    sources = [order.locate(cursor)[0] for cursor in range(num_prompts)]
    worst = Fraction(0)
    for source, weight in enumerate(weights):
        counts = [sum(of == source for of in sources[:window])]
        for before, after in zip(sources, sources[window:], strict=False):
            counts.append(counts[-1] - (before == source) + (after == source))
        worst = max(worst, *(abs(count - window * Fraction(weight) / total) for count in counts))
    return worst


@settings(max_examples=40, deadline=None)
@given(st.tuples(WEIGHT, WEIGHT), st.integers(0, 2**32), st.sampled_from([7, 100, 333]))
def test_two_sources_are_within_one_prompt_of_their_shares_in_every_stretch(weights, seed, window):
    assert _largest_error(weights, seed, window, 1000) < 1.001


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([4, 10, 20, 25, 50, 100]), st.integers(2, 4), st.integers(0, 2**32))
def test_weights_in_hundredths_are_met_in_every_stretch_of_a_hundred(data, total, num_sources, seed):
    cuts = data.draw(
        st.lists(st.integers(1, total - 1), min_size=num_sources - 1, max_size=num_sources - 1, unique=True)
    )
    edges = [0, *sorted(cuts), total]
    weights = [after - before for before, after in itertools.pairwise(edges)]
    assert _largest_error(weights, seed, 100, 400) == 0


@pytest.mark.parametrize("num_sources", [3, 4, 6, 9])
def test_many_sources_are_within_two_prompts_of_their_shares_in_every_stretch(num_sources):
    draw = random.Random(num_sources)
    for seed in range(6):
        assert _largest_error([draw.uniform(0.02, 1) for _ in range(num_sources)], seed, 100, 800) < 2


def test_sources_of_one_size_have_orders_of_their_own():
    taken = MixedOrder([50, 50], [1, 1], 3).take(0, 100)
    assert [place for of, place in taken if of == 0] != [place for of, place in taken if of == 1]


def test_the_seed_moves_where_the_sources_come():
    assert len({tuple(MixedOrder([9, 9], [7, 3], seed).take(0, 10)) for seed in range(8)}) > 4


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([3], [1, 1]), ([3, 3], [1, 0]), ([3, 0], [1, 1])])
def test_no_mixture_without_sources_weights_and_prompts(sizes, weights):
    with pytest.raises(AssertionError):
        MixedOrder(sizes, weights, 1)


def test_the_prompts_of_each_source_come_in_its_own_order():
    """Prompts of two sources take turns in the list; those of a run without sources are one."""
    prompts = [Prompt(i, ({"role": "user", "content": "?"},), "1", "ab"[i % 2]) for i in range(6)]
    data = Data(kind="files", seed=4, sources={"a": DataSource(weight=2), "b": DataSource(weight=1)})
    order = MixedOrder([3, 3], [2, 1], 4)
    for start, count in ((0, 6), (4, 3)):
        taken = PromptMix(prompts, data).take(start, count)
        assert [p.prompt_id for p in taken] == [2 * place + source for source, place in order.take(start, count)]
    alone = [replace(prompt, source="") for prompt in prompts]
    assert [p.prompt_id for p in PromptMix(alone, Data(kind="files", seed=4)).take(0, 9)] == PromptOrder(6, 4).take(
        0, 9
    )


def test_weights_are_whole_numbers_without_a_common_factor():
    assert _whole([0.2, 0.4, 0.1]) == [2, 4, 1]
    assert _whole([6, 4]) == [3, 2]
    assert _whole([1, 1e-6]) == [1_000_000, 1]
    with pytest.raises(AssertionError, match="one is below 1/1000000"):
        _whole([1, 1e-7])


@pytest.mark.parametrize("order", [PromptOrder(3, 1), MixedOrder([3, 3], [1, 1], 1)])
def test_a_cursor_is_not_negative(order):
    assert order.take(0, 0) == []
    for start, count in ((-1, 1), (0, -1)):
        with pytest.raises(AssertionError, match=f"start {start}, count {count}"):
            order.take(start, count)

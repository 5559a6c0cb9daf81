import random

import pytest

from posttrain.errors import ConfigError
from posttrain.rl.data.sort_digits import generate_prompts, is_heldout, num_possible_prompts


def _digits(rows: list[dict]) -> list[str]:
    return [row["prompt"][1]["content"] for row in rows]


def test_a_row_by_hand():
    train, _ = generate_prompts(2, 80, 0, seed=0)
    row = next(row for row in train if row["prompt"][1]["content"] == "73")
    assert row == {
        "prompt": [{"role": "system", "content": "sort the digits."}, {"role": "user", "content": "73"}],
        "label": "37",
    }


@pytest.mark.parametrize(
    ("digits", "heldout"), [("3141", False), ("0000", True), ("5", True), ("31", True), ("13", False)]
)
def test_which_numbers_are_held_out(digits, heldout):
    # Weighted sums: 3 + 2 + 12 + 4 = 21, 0, 5, 3 + 2 = 5, 1 + 6 = 7.
    assert is_heldout(digits) == heldout


@pytest.mark.parametrize("num_digits", [2, 3, 4, 5])
def test_exactly_one_fifth_is_held_out(num_digits):
    found = sum(is_heldout(f"{number:0{num_digits}}") for number in range(10**num_digits))
    assert num_possible_prompts(num_digits) == (10**num_digits - found, found)
    assert found * 5 == 10**num_digits


def test_counts_and_disjoint_and_distinct():
    train, heldout = generate_prompts(4, 4096, 512, seed=7)
    assert (len(train), len(heldout)) == (4096, 512)
    assert len({*_digits(train), *_digits(heldout)}) == 4096 + 512
    for row in train + heldout:
        assert row["label"] == "".join(sorted(row["prompt"][1]["content"]))
        assert len(row["label"]) == 4


def test_training_rows_of_one_seed_are_never_held_out_by_another():
    heldout = {digits for seed in range(5) for digits in _digits(generate_prompts(3, 0, 150, seed)[1])}
    train = {digits for seed in range(5) for digits in _digits(generate_prompts(3, 700, 0, seed)[0])}
    assert not heldout & train


def test_the_same_seed_gives_the_same_rows_whatever_the_global_state():
    random.seed(1)
    first = generate_prompts(4, 100, 20, seed=3)
    random.seed(2)
    before = random.getstate()
    assert generate_prompts(4, 100, 20, seed=3) == first
    assert random.getstate() == before
    assert generate_prompts(4, 100, 20, seed=4) != first


def test_all_of_the_numbers_can_be_had():
    train, heldout = generate_prompts(2, 80, 20, seed=0)
    assert sorted(_digits(train) + _digits(heldout)) == [f"{number:02}" for number in range(100)]


def test_too_many_are_refused_with_both_limits():
    with pytest.raises(ConfigError) as refused:
        generate_prompts(2, 81, 21, seed=0)
    text = str(refused.value)
    assert "data.num_train_prompts = 81" in text
    assert "at most 80" in text
    assert "data.num_heldout_prompts = 21" in text
    assert "at most 20" in text
    assert "raise data.num_digits" in text

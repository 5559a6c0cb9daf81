"""Who sends which part of which tensor to whom, and in which round: planned, without any rank."""

from __future__ import annotations

import random

import pytest
from tests.support.loopback_engines import LoopbackEngines

from posttrain.engines.in_sglang.posttrain_plugin.followed import Box
from posttrain.weight_sync.holdings import HeldPart
from posttrain.weight_sync.letters import plan_letters, spread


def test_every_number_comes_from_one_that_has_it_and_the_busiest_is_spared() -> None:
    """Drawn cuts of senders and receivers; what they say of each other is looked at number by number."""
    for seed in range(20):
        drawn = random.Random(seed)
        shapes = {f"w{i}": (drawn.randrange(4, 40), drawn.randrange(4, 40)) for i in range(30)}
        engines = LoopbackEngines({name: (shape, "BF16") for name, shape in shapes.items()}, 2, 3, seed)
        held = [rank.parts for rank in engines.ranks]
        holders = {name: _cuts(shape, drawn) for name, shape in shapes.items()}
        letters = plan_letters(held, holders, 512)
        got = {(r, n): 0 for r, parts in enumerate(held) for n in range(len(parts))}
        for letter in letters:
            part = held[letter.receiver][letter.piece.part]
            assert letter.sender in holders[letter.name][letter.made]
            assert letter.box.meets(letter.made) == letter.box.meets(part.box) == letter.box
            assert letter.piece.box == letter.box.within(part.box)
            got[letter.receiver, letter.piece.part] += letter.box.rows * letter.box.columns
        assert all(size == held[r][n].box.rows * held[r][n].box.columns for (r, n), size in got.items())
        assert spread(letters, 4) < 1.2
        assert plan_letters(held, holders, 512) == letters, "alike on every rank"
        in_order = [(letter.sender, letter.piece.round) for letter in letters]
        assert in_order == sorted(in_order)
        for place in set(in_order):
            size = [letter.num_bytes for letter in letters if (letter.sender, letter.piece.round) == place]
            assert sum(size) <= 512 or len(size) == 1


def _cuts(shape: tuple[int, int], drawn: random.Random) -> dict[Box, list[int]]:
    """Cut a tensor between pairs of four senders, or leave it whole on all of them."""
    rows, columns = shape
    if drawn.random() < 0.5:
        return {Box(0, 0, rows, columns): [0, 1, 2, 3]}
    cut = drawn.randrange(1, rows)
    return {Box(0, 0, cut, columns): [0, 2], Box(cut, 0, rows - cut, columns): [1, 3]}


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        ({}, "too little of it"),
        ({Box(0, 0, 3, 4): [0]}, "too little of it"),
        ({Box(0, 0, 4, 4): [0], Box(2, 0, 2, 4): [1]}, "some of it twice"),
    ],
)
def test_what_nobody_has_is_named(holders: dict[Box, list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=rf"w, Box\(row=0.*{words}"):
        plan_letters([[HeldPart("w", Box(0, 0, 4, 4), "bfloat16")]], {"w": holders}, 512)

"""Who sends which part of which tensor to whom, and in which round: planned, without any rank."""

from __future__ import annotations

import random

import pytest
from tests.support.loopback_engines import LoopbackEngines

from posttrain_weights.box import Box
from posttrain_weights.transfer_plan import EngineSlice, plan_transfer, spread


def test_every_number_comes_from_one_that_has_it_and_the_busiest_is_spared() -> None:
    """Drawn cuts of senders and receivers; what they say of each other is looked at number by number."""
    for seed in range(20):
        drawn = random.Random(seed)
        shapes = {f"w{i}": (drawn.randrange(4, 40), drawn.randrange(4, 40)) for i in range(30)}
        engines = LoopbackEngines({name: (shape, "BF16") for name, shape in shapes.items()}, 2, 3, seed)
        held = [rank.parts for rank in engines.ranks]
        holders = {name: _cuts(shape, drawn) for name, shape in shapes.items()}
        transfers = plan_transfer(held, holders, 512)
        got = {(r, n): 0 for r, parts in enumerate(held) for n in range(len(parts))}
        for transfer in transfers:
            part = held[transfer.receiver][transfer.piece.part]
            assert transfer.sender in holders[transfer.name][transfer.made]
            assert transfer.box.meets(transfer.made) == transfer.box.meets(part.box) == transfer.box
            assert transfer.piece.box == transfer.box.within(part.box)
            got[transfer.receiver, transfer.piece.part] += transfer.box.rows * transfer.box.columns
        assert all(size == held[r][n].box.rows * held[r][n].box.columns for (r, n), size in got.items())
        assert spread(transfers, 4) < 1.2
        assert plan_transfer(held, holders, 512) == transfers, "alike on every rank"
        in_order = [(transfer.sender, transfer.piece.round) for transfer in transfers]
        assert in_order == sorted(in_order)
        for place in set(in_order):
            size = [transfer.num_bytes for transfer in transfers if (transfer.sender, transfer.piece.round) == place]
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
        ({Box(0, 0, 3, 4): [0], Box(3, 0, 1, 3): [1]}, "too little of it"),
        ({Box(0, 0, 4, 4): [0], Box(2, 0, 2, 4): [1]}, "some of it twice"),
    ],
)
def test_what_nobody_has_is_named(holders: dict[Box, list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=rf"w, Box\(row=0.*{words}"):
        plan_transfer([[EngineSlice("w", Box(0, 0, 4, 4), "bfloat16")]], {"w": holders}, 512)


ROUND_BYTES = 512


def rounds_of(parts: list[tuple[str, int, int, int]]) -> dict[str, int]:
    """Return the round of each part, in the order in which they are planned.

    Args:
        parts: Of each its name, its bytes, the one sender that has it and the receiver that keeps it.
    """
    held: list[list[EngineSlice]] = [[] for _ in range(1 + max(receiver for *_, receiver in parts))]
    holders = {}
    for name, num_bytes, sender, receiver in parts:
        box = Box(0, 0, 1, num_bytes // 2)
        held[receiver].append(EngineSlice(name, box, "bfloat16"))
        holders[name] = {box: [sender]}
    return {transfer.name: transfer.piece.round for transfer in plan_transfer(held, holders, ROUND_BYTES)}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # A sender fills a round; what does not fit waits, and what is larger goes alone.
        ([("a", 256, 0, 0), ("b", 256, 0, 1), ("c", 16, 0, 2)], {"a": 0, "b": 0, "c": 1}),
        ([("a", 1536, 0, 0), ("b", 16, 0, 0)], {"a": 0, "b": 1}),
        # A receiver takes two senders' rounds at a time.
        ([("a", 512, 0, 0), ("b", 512, 1, 0), ("c", 16, 2, 0)], {"a": 0, "b": 0, "c": 1}),
        # Three senders: the second is the first of the second round, in which the third has its turn.
        (
            [(f"{sender}{number}", 512, sender, 0) for sender in range(3) for number in range(2)],
            {"00": 0, "01": 2, "10": 0, "11": 1, "20": 1, "21": 2},
        ),
        # Of a sender in the order of the Hub's tensors, whoever keeps them.
        ([("z", 256, 0, 1), ("a", 256, 0, 0), ("y", 512, 0, 0)], {"z": 0, "a": 0, "y": 1}),
    ],
)
def test_rounds_by_hand(parts: list[tuple[str, int, int, int]], expected: dict[str, int]) -> None:
    assert [*rounds_of(parts).items()] == [*expected.items()]


def test_a_part_comes_from_whoever_has_least_to_send_then_from_the_first() -> None:
    box, everybody = Box(0, 0, 1, 256), [2, 1]
    holders = {"a": {box: [1]}, "b": {box: everybody}, "c": {box: everybody}}
    transfers = plan_transfer([[EngineSlice(name, box, "bfloat16") for name in holders]], holders, ROUND_BYTES)
    assert {transfer.name: transfer.sender for transfer in transfers} == {"a": 1, "b": 2, "c": 1}
    assert spread(transfers, 2 + 1) == 2.0, "1024 bytes where the mean is 512"


@pytest.mark.parametrize(("dtype", "size"), [("float32", 64), ("bfloat16", 32), ("float16", 32), ("float8_e4m3fn", 16)])
def test_the_bytes_of_a_letter(dtype: str, size: int) -> None:
    """Of fifteen numbers, aligned to sixteen bytes."""
    box = Box(0, 0, 3, 5)
    (transfer,) = plan_transfer([[EngineSlice("a", box, dtype)]], {"a": {box: [0]}}, ROUND_BYTES)
    assert transfer.num_bytes == size

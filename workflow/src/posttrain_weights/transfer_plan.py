"""Which rank sends which slice of which tensor to which engine rank, in which round; equal on every rank."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from posttrain_weights import RECEIVED_ROUNDS
from posttrain_weights.box import Box
from posttrain_weights.messages import Piece, size_of

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class HeldPart(NamedTuple):
    """A slice of a tensor as an engine rank holds it.

    Args:
        name: Of the tensor, on the Hub.
        box: Which part.
        dtype: As torch spells it.
    """

    name: str
    box: Box
    dtype: str


class Letter(NamedTuple):
    """A part of a tensor on its way.

    Args:
        sender: Trainer rank.
        receiver: Engine rank, counted through all engines.
        name: Of the tensor.
        made: Which part of it the sender makes, of which this is one.
        box: Which part of the tensor.
        dtype: As the receiver keeps it.
        piece: What the receiver is told of it.
    """

    sender: int
    receiver: int
    name: str
    made: Box
    box: Box
    dtype: str
    piece: Piece

    @property
    def num_bytes(self) -> int:
        """In a message."""
        return size_of(self.box.rows, self.box.columns, SIZES[self.dtype])


def plan_letters(
    held: Sequence[Sequence[HeldPart]], holders: Mapping[str, Mapping[Box, Sequence[int]]], round_bytes: int
) -> list[Letter]:
    """Return all letters, those of a sender in the order of the Hub's tensors.

    Each number of each receiver's parts comes from one sender; where several have it, from that with the least to send.

    Args:
        held: What each receiver keeps.
        holders: Name -> part -> senders that can make it.
        round_bytes: What a sender sends in a round; a receiver gets `RECEIVED_ROUNDS` of it. A larger part goes alone.

    Raises:
        ValueError: Nobody has a part of what is kept; names it.
    """
    loads = Counter[int]()
    order = {name: number for number, name in enumerate(holders)}
    letters = []
    for receiver, parts in enumerate(held):
        for number, part in enumerate(parts):
            for letter in _letters_of(part, number, receiver, holders.get(part.name, {}), loads):
                loads[letter.sender] += letter.num_bytes
                letters.append(letter)
    letters.sort(key=lambda letter: (letter.sender, order[letter.name], letter.made, letter.receiver))
    return [*_in_rounds(letters, round_bytes)]


def _letters_of(
    part: HeldPart, number: int, receiver: int, holders: Mapping[Box, Sequence[int]], loads: Counter[int]
) -> Iterator[Letter]:
    missing = part.box.rows * part.box.columns
    for made, senders in holders.items():
        if both := made.meets(part.box):
            sender = min(senders, key=lambda rank: (loads[rank], rank))
            piece = Piece(0, number, both.within(part.box))
            yield Letter(sender, receiver, part.name, made, both, part.dtype, piece)
            missing -= both.rows * both.columns
    if missing:
        found = "too little of it" if missing > 0 else "some of it twice"
        raise ValueError(f"{part.name}, {part.box}: the trainer's ranks have {found}")


def _in_rounds(letters: Sequence[Letter], round_bytes: int) -> Iterator[Letter]:
    """Return letters with their rounds: each sender's in order, none above its memory limit.

    Senders take turns in being the first of a round, so that none waits for ever for a receiver that has enough.
    """
    left = {sender: deque(group) for sender, group in itertools.groupby(letters, lambda letter: letter.sender)}
    done: dict[int, list[Letter]] = {sender: [] for sender in left}
    number = 0
    while left:
        got: Counter[int] = Counter()
        first = number % len(left)
        for sender in (*itertools.islice(left, first, None), *itertools.islice(left, first)):
            size, waiting = 0, left[sender]
            while waiting:
                letter, takes = waiting[0], waiting[0].num_bytes
                is_full = size and size + takes > round_bytes
                if is_full or (got[letter.receiver] and got[letter.receiver] + takes > RECEIVED_ROUNDS * round_bytes):
                    break
                size, got[letter.receiver] = size + takes, got[letter.receiver] + takes
                done[sender].append(letter._replace(piece=letter.piece._replace(round=number)))
                waiting.popleft()
        left = {sender: waiting for sender, waiting in left.items() if waiting}
        number += 1
    return itertools.chain.from_iterable(done.values())


def spread(letters: Sequence[Letter], num_senders: int) -> float:
    """Return the largest sender's bytes divided by the senders' mean."""
    sent = [0] * num_senders
    for letter in letters:
        sent[letter.sender] += letter.num_bytes
    return max(sent) / (math.fsum(sent) / num_senders)

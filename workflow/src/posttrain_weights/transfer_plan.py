"""Plans which trainer rank sends which slice to which engine rank in which round; the same on every rank."""

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


class EngineSlice(NamedTuple):
    """A slice of a tensor as an engine rank holds it.

    Args:
        name: Hub name of the tensor.
        box: Its box in the tensor.
        dtype: Torch dtype name.
    """

    name: str
    box: Box
    dtype: str


class SliceTransfer(NamedTuple):
    """The transfer of one slice from a trainer rank to an engine rank.

    Args:
        sender: Trainer rank.
        receiver: Engine rank, counted over all engines.
        name: Name of the tensor.
        made: The sender's box of the tensor, which contains `box`.
        box: The transferred box of the tensor.
        dtype: The receiver's dtype.
        piece: The receiver's description of it.
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
        """Bytes in a message."""
        return size_of(self.box.rows, self.box.columns, SIZES[self.dtype])


def plan_transfer(
    held: Sequence[Sequence[EngineSlice]], holders: Mapping[str, Mapping[Box, Sequence[int]]], round_bytes: int
) -> list[SliceTransfer]:
    """Return all transfers; each sender's are in Hub tensor order.

    Each element of a receiver's slice comes from one sender: of those that hold it, the one with the least to send.

    Args:
        held: Slices of each receiver.
        holders: Name -> box -> senders that can compute it.
        round_bytes: Bytes per sender and round; a receiver gets up to `RECEIVED_ROUNDS` times that. Larger slices go
            alone.

    Raises:
        ValueError: No sender has a part of a slice; names it.
    """
    loads = Counter[int]()
    order = {name: number for number, name in enumerate(holders)}
    transfers = []
    for receiver, parts in enumerate(held):
        for number, part in enumerate(parts):
            for transfer in _transfers_of(part, number, receiver, holders.get(part.name, {}), loads):
                loads[transfer.sender] += transfer.num_bytes
                transfers.append(transfer)
    transfers.sort(key=lambda transfer: (transfer.sender, order[transfer.name], transfer.made, transfer.receiver))
    return [*_in_rounds(transfers, round_bytes)]


def _transfers_of(
    part: EngineSlice, number: int, receiver: int, holders: Mapping[Box, Sequence[int]], loads: Counter[int]
) -> Iterator[SliceTransfer]:
    missing = part.box.rows * part.box.columns
    for made, senders in holders.items():
        if both := made.meets(part.box):
            sender = min(senders, key=lambda rank: (loads[rank], rank))
            piece = Piece(0, number, both.within(part.box))
            yield SliceTransfer(sender, receiver, part.name, made, both, part.dtype, piece)
            missing -= both.rows * both.columns
    if missing:
        found = "too little of it" if missing > 0 else "some of it twice"
        raise ValueError(f"{part.name}, {part.box}: the trainer's ranks have {found}")


def _in_rounds(transfers: Sequence[SliceTransfer], round_bytes: int) -> Iterator[SliceTransfer]:
    """Return transfers with their rounds: each sender's in order, none above its memory limit.

    Senders alternate in going first in a round, so that none starves at a receiver that is at its limit.
    """
    left = {sender: deque(group) for sender, group in itertools.groupby(transfers, lambda transfer: transfer.sender)}
    done: dict[int, list[SliceTransfer]] = {sender: [] for sender in left}
    number = 0
    while left:
        got: Counter[int] = Counter()
        first = number % len(left)
        for sender in (*itertools.islice(left, first, None), *itertools.islice(left, first)):
            size, waiting = 0, left[sender]
            while waiting:
                transfer, takes = waiting[0], waiting[0].num_bytes
                is_full = size and size + takes > round_bytes
                if is_full or (
                    got[transfer.receiver] and got[transfer.receiver] + takes > RECEIVED_ROUNDS * round_bytes
                ):
                    break
                size, got[transfer.receiver] = size + takes, got[transfer.receiver] + takes
                done[sender].append(transfer._replace(piece=transfer.piece._replace(round=number)))
                waiting.popleft()
        left = {sender: waiting for sender, waiting in left.items() if waiting}
        number += 1
    return itertools.chain.from_iterable(done.values())


def spread(transfers: Sequence[SliceTransfer], num_senders: int) -> float:
    """Return the largest sender's bytes divided by the senders' mean."""
    sent = [0] * num_senders
    for transfer in transfers:
        sent[transfer.sender] += transfer.num_bytes
    return max(sent) / (math.fsum(sent) / num_senders)

"""Messages that have values, between the ranks that are rehearsed: counts, shapes, objects.

Whoever waits for a message waits as on a cluster. A call that the others answer with another one would hang there; here
both sides are named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import TCPStore

# So long without a message is a hang: ranks share few cores.
PATIENCE = timedelta(seconds=180)


class HangError(RuntimeError):
    """Two ranks of a group do not do the same."""


class Messages:
    """What this rank has said and heard.

    Args:
        store: Where all ranks leave their messages.
        rank: This one.
        members: All that are rehearsed.
    """

    def __init__(self, store: TCPStore, rank: int, members: Sequence[int]):
        self._store, self._rank, self._members = store, rank, list(members)
        self._store.set_timeout(PATIENCE)
        self._counts: Counter[str] = Counter()

    def all_said(self, group: str, ranks: Sequence[int], call: str, place: str, mine: bytes) -> list[bytes]:
        """Return what each rank of a group has said; those that are not rehearsed say what one that is has said.

        Raises:
            HangError: Another one called something else, or does not call.
        """
        number = self._counts[group]
        self._counts[group] += 1
        head = json.dumps([call, place]).encode()
        self._store.set(f"{group}/{number}/{self._rank}", len(head).to_bytes(4, "big") + head + mine)
        there = [rank for rank in ranks if rank in self._members]
        said = {rank: self._heard(f"{group}/{number}/{rank}", rank, call, place) for rank in there}
        return [said.get(rank, said[there[index % len(there)]]) for index, rank in enumerate(ranks)]

    def send(self, to: int, call: str, place: str, mine: bytes) -> None:
        """Leave a message for one rank."""
        key = f"{self._rank}>{to}"
        head = json.dumps([call, place]).encode()
        self._store.set(f"{key}/{self._counts[key]}", len(head).to_bytes(4, "big") + head + mine)
        self._counts[key] += 1

    def receive(self, origin: int, place: str) -> bytes:
        """Return the next message of one rank."""
        key = f"{origin}>{self._rank}"
        number = self._counts[key]
        self._counts[key] += 1
        return self._heard(f"{key}/{number}", origin, "", place)

    def _heard(self, key: str, origin: int, call: str, place: str) -> bytes:
        try:
            content = self._store.get(key)
        except Exception as error:  # torch's own, of several types
            raise HangError(f"rank {self._rank} waits for rank {origin} in {call or 'recv'} at {place}") from error
        length = int.from_bytes(content[:4], "big")
        theirs, where = json.loads(content[4 : 4 + length])
        if call and theirs != call:
            raise HangError(
                f"rank {self._rank} calls {call} at {place}, rank {origin} of the same group calls {theirs} at {where}"
            )
        return content[4 + length :]


def to_bytes(tensor: torch.Tensor | None) -> bytes:
    """Return a tensor's bytes; none of them for values that nobody knows."""
    return b"" if tensor is None else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(content: bytes, like: torch.Tensor) -> torch.Tensor | None:
    """Return `to_bytes`'s tensor, of another one's type and shape."""
    if len(content) != like.numel() * like.element_size():
        return None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(like.dtype).view(like.shape)

"""Messages with values between the rehearsed ranks: counts, shapes, objects.

A rank waits for a message as on a cluster. Different calls of one group's ranks, or all ranks waiting, would hang
there; here they raise an error that names both ranks.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import DistStoreError, Store

# A waiting rank checks this often whether any rank still computes.
LOOK = timedelta(seconds=5)
LOOKS = 3


class HangError(RuntimeError):
    """Ranks of a group call different collectives, which would hang on a cluster."""


class Messages:
    """Exchanges this rank's messages.

    Args:
        store: Store for the messages of all ranks.
        rank: This rank.
        members: All rehearsed ranks.
        of_stage: Number of ranks per pipeline stage; absent stages send the messages of a neighbour.
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int], of_stage: int = 1):
        self._store, self._rank, self.members, self._of_stage = store, rank, list(members), of_stage
        self._store.set_timeout(LOOK)
        self._counts: Counter[str] = Counter()

    def all_said(self, group: str, ranks: Sequence[int], call: str, place: str, mine: bytes) -> list[bytes]:
        """Return the message of each rank of a group; absent ranks send that of a rehearsed one.

        Raises:
            HangError: A rank calls another collective, sends another number of bytes, or does not call.
        """
        number = self._counts[group]
        self._counts[group] += 1
        self._say(f"{group}/{number}/{self._rank}", call, place, mine)
        there = [rank for rank in ranks if rank in self.members]
        said = {rank: self._heard(f"{group}/{number}/{rank}", rank, call, place) for rank in there}
        for rank, theirs in said.items():
            if mine and theirs and len(mine) != len(theirs):
                here = f"rank {self._rank} gives {len(mine)} bytes to {call} at {place}"
                raise HangError(f"{here}, rank {rank} of the same group gives {len(theirs)}")
        return [said.get(rank, said[there[index % len(there)]]) for index, rank in enumerate(ranks)]

    def send(self, to: int, call: str, place: str, mine: bytes) -> None:
        """Send a message to one rank."""
        key = f"{self._rank}>{to}"
        self._say(f"{key}/{self._counts[key]}", call, place, mine)
        self._counts[key] += 1

    def receive(self, origin: int, place: str) -> bytes:
        """Return the next message from one rank.

        Raises:
            HangError: The rank sends none.
        """
        number = self._counts[f"{origin}>{self._rank}"]
        self._counts[f"{origin}>{self._rank}"] += 1
        origin, to = self._in_place_of(origin)
        return self._heard(f"{origin}>{to}/{number}", origin, "send", place)

    def _in_place_of(self, origin: int) -> tuple[int, int]:
        """Return a rehearsed pair that exchanges the same message: the nearest stages beyond an absent one.

        Example:
            With stages 0, 1 and 3 of one rank each, 3 receives from 2 what 2 would receive from 1, and 1 receives from
            2 what 2 would receive from 3.
        """
        to, away = self._rank, self._of_stage if origin > self._rank else -self._of_stage
        while origin not in self.members:
            origin, to = origin + away, to + away
        return origin, to

    def end(self) -> None:
        """Mark this rank as silent."""
        self._store.add("silent", 1)

    def _say(self, key: str, call: str, place: str, mine: bytes) -> None:
        # A store's values are limited to 8 MiB; rollouts are larger, but their equal tokens compress well.
        head, body = json.dumps([call, place]).encode(), zlib.compress(mine, level=1)
        self._store.set(key, len(head).to_bytes(4, "big") + head + body)  # type: ignore[arg-type]

    def _heard(self, key: str, origin: int, call: str, place: str) -> bytes:
        content = self._awaited(key, f"rank {self._rank} waits for rank {origin} in {call} at {place}")
        length = int.from_bytes(content[:4], "big")
        theirs, where = json.loads(content[4 : 4 + length])
        if theirs != call:
            raise HangError(
                f"rank {self._rank} calls {call} at {place}, rank {origin} of the same group calls {theirs} at {where}"
            )
        return zlib.decompress(content[4 + length :])

    def _awaited(self, key: str, words: str) -> bytes:
        if self._store.check([key]):
            return self._store.get(key)
        self._store.add("silent", 1)
        looks = 0
        while True:
            try:
                content = self._store.get(key)
                self._store.add("silent", -1)
                return content
            except DistStoreError:
                looks = looks + 1 if self._store.add("silent", 0) >= len(self.members) else 0
            if looks >= LOOKS:
                raise HangError(f"{words}, and no rank computes any more")


def to_bytes(tensor: torch.Tensor | None) -> bytes:
    """Return a tensor's bytes; empty for unknown values."""
    return b"" if tensor is None else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(content: bytes, like: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of `to_bytes` with another tensor's type and shape; None if the sizes differ."""
    if len(content) != like.numel() * like.element_size():
        return None
    if not content:
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(like.dtype).view(like.shape)

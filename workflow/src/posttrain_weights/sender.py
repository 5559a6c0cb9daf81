"""The sending side of a transfer: a rank's own messages, and those that it relays to ranks on its GPU.

A message for a member that shares memory is written there: the member gets a notice with its place, reads it, and
acknowledges. Over NCCL a message goes to its receiver's GPU; if another process is NCCL's member on that GPU, that
process receives it into shared memory and sends the notice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain_weights.channel import CLOSED, CPU, NOTICES, READ, ROUNDS_AT_ONCE, TELLING, Channel
from posttrain_weights.delta import DeltaHeader
from posttrain_weights.messages import aligned, fill, size_of_all
from posttrain_weights.shared_memory import Shared, notice_of
from posttrain_weights.transport import Transport

# (source, destination) of a message.
Pair = tuple[int, int]


@dataclass(frozen=True)
class Sending:
    """A round that is being sent.

    Args:
        channel: The channel.
        number: Number of the round.
        works: Handles of pending messages.
        kept: Buffers to keep alive until they are sent.
        notices: Destination -> notice with the place of its messages.
        passes_on: Some messages to relay have not arrived yet.
    """

    channel: Channel
    number: int
    works: list[Any]
    kept: Sequence[torch.Tensor]
    notices: Mapping[int, torch.Tensor]
    passes_on: bool

    def wait(self) -> None:
        """Wait until all receivers have the round."""
        self._settle()
        if self.passes_on:
            self.give_notice()
            self._settle()
        for to in self.notices:
            self.channel.hear(to, READ + self.number)

    def give_notice(self) -> None:
        """Send the notices, once their messages are in place."""
        if self.notices:
            self.channel.synchronize()
        self.works.extend(self.channel.send(notice, to, NOTICES + self.number) for to, notice in self.notices.items())

    def _settle(self) -> None:
        while self.works:
            self.works.pop().wait()


class Sender:
    """Sends round by round, at most two at a time.

    Args:
        channel: Channel to the engines.
        passed_on: Round -> (source, destination) -> bytes that this rank relays.
        room: Maximum shared memory bytes of a round.
        neighbours: Members that read this rank's shared memory.
    """

    def __init__(
        self, channel: Channel, passed_on: Mapping[int, Mapping[Pair, int]], room: int, neighbours: Sequence[int]
    ):
        self._channel, self._passed_on, self._room, self._neighbours = channel, passed_on, room, neighbours
        self._slots: dict[int, Shared] = {}
        self._telling: list[tuple[Any, torch.Tensor]] = []

    def pack(self, number: int, pieces: Mapping[int, Sequence[torch.Tensor]]) -> dict[Pair, torch.Tensor]:
        """Build the messages of a round: those of this rank, and buffers for those that it relays.

        Args:
            number: Of the round.
            pieces: Destination -> pieces, [rows, columns] each; padding in a message is undefined.
        """
        rank, is_shared = self._channel.rank, self._is_shared
        sizes = {(rank, to): size_of_all(values) for to, values in pieces.items() if values}
        sizes |= self._passed_on.get(number, {})
        places = self._in_slot(number, {pair: size for pair, size in sizes.items() if is_shared(pair)})
        for pair in sizes.keys() - places.keys():
            places[pair] = self._channel.buffer(sizes[pair], self._channel.device, "made", number, pair[1])
        for to, values in pieces.items():
            if values:
                fill(places[rank, to], values)
        return places

    def tell(self, number: int, told: Mapping[int, Sequence[DeltaHeader]]) -> None:
        """Start sending the `DeltaHeader`s of a round, ahead of its messages."""
        channel = self._channel
        for to, of_them in told.items():
            table = torch.tensor(of_them, dtype=torch.int64)
            self._telling.append((channel.send(table, to, TELLING + number), table))
            channel.num_sent += table.nbytes

    def begin(self, number: int, messages: Mapping[Pair, torch.Tensor]) -> Sending:
        """Start sending the messages of a round (from `pack`) once the last round is sent."""
        channel, ways = self._channel, self._channel.ways
        own = {to: message for (by, to), message in messages.items() if by == channel.rank}
        on_host = {to: self._on_host(own[to], number, to) for to in own if ways.way(channel.rank, to) is Transport.HOST}
        telling, self._telling = self._telling, []
        works = [work for work, _ in telling]
        works += [channel.send(message, to, number) for to, message in on_host.items()]
        to_group = [to for to in sorted(own) if ways.way(channel.rank, to) is Transport.GROUP]
        coming = sorted((to, by) for by, to in messages if by != channel.rank)
        works += channel.among_devices(
            [(ways.deputy(to), own[to]) for to in to_group], [(by, messages[by, to]) for to, by in coming]
        )
        channel.num_sent += sum(map(len, own.values()))
        kept = [*(table for _, table in telling), *on_host.values(), *messages.values()]
        sending = Sending(channel, number, works, kept, self._notices(number, messages), passes_on=bool(coming))
        if not coming:
            sending.give_notice()
        return sending

    def finish(self) -> None:
        """Free the GPU's shared memory once no process maps it."""
        if self._channel.device == CPU:
            return
        for neighbour in self._neighbours:
            self._channel.hear(neighbour, CLOSED)
        self.close()

    def close(self) -> None:
        """Free shared memory."""
        for slot in self._slots.values():
            slot.close()
        self._slots = {}

    def _is_shared(self, pair: Pair) -> bool:
        return pair[0] != self._channel.rank or self._channel.ways.way(*pair) is Transport.SHARED

    def _in_slot(self, number: int, sizes: Mapping[Pair, int]) -> dict[Pair, torch.Tensor]:
        if not sizes:
            return {}
        slot, begin, places = number % ROUNDS_AT_ONCE, 0, {}
        if slot not in self._slots:
            self._slots[slot] = Shared(self._room, self._channel.device)
        for pair, size in sizes.items():
            places[pair] = self._slots[slot].values[begin : begin + size]
            begin += aligned(size)
        return places

    def _notices(self, number: int, messages: Mapping[Pair, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return destination -> notice: the memory handle and the offsets of its messages, in sender order."""
        about: dict[int, list[int]] = defaultdict(list)
        shared = self._slots.get(number % ROUNDS_AT_ONCE)
        for by, to in sorted(messages):
            if self._is_shared((by, to)):
                assert shared
                about[to].append(int(messages[by, to].storage_offset()))
        return {to: notice_of(shared, begins) for to, begins in about.items() if shared}

    def _on_host(self, message: torch.Tensor, number: int, member: int) -> torch.Tensor:
        if message.device == CPU:
            return message
        return self._channel.buffer(len(message), CPU, "sent", number, member).copy_(message)

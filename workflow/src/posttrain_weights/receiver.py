"""The engine rank's side of a transfer: receives the messages of each round and writes them into the weights.

The trainer plans the transfer and sends the plan once. Then a transfer consists of rounds of flat messages, at most one
per sender and round, so that a rank needs memory for at most two rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain_weights.box import Box
from posttrain_weights.channel import CLOSED, CPU, NOTICES, READ, TELLING, Channel
from posttrain_weights.delta import HEADER_BYTES, WHOLE_PART, DeltaHeader, change, pieces_of
from posttrain_weights.messages import Piece, size_of_all, split
from posttrain_weights.shared_memory import Mapped, empty_notice, read_notice
from posttrain_weights.transport import Transport


@dataclass(frozen=True)
class Receiving:
    """A round that is being received.

    Args:
        works: Handles of pending messages.
        places: Source -> buffer of its message.
        notices: Neighbour -> (its notice, (source, bytes) of the announced messages, in order).
    """

    works: Sequence[Any]
    places: Mapping[int, torch.Tensor]
    notices: Mapping[int, tuple[torch.Tensor, Sequence[tuple[int, int]]]]


class Inbox:
    """Receives the messages of rounds over any transport.

    Args:
        channel: With the trainer.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._mapped: dict[bytes, Mapped] = {}

    def begin(self, sizes: Mapping[int, int], number: int) -> Receiving:
        """Start receiving the messages of a round.

        Args:
            sizes: Source -> bytes of its message.
            number: Of the round.
        """
        channel, ways = self._channel, self._channel.ways
        about: dict[int, list[tuple[int, int]]] = defaultdict(list)
        places, over_group, works = {}, [], []
        for by, size in sorted(sizes.items()):
            neighbour = ways.neighbour(by, channel.rank)
            if neighbour is not None:
                about[neighbour].append((by, size))
            elif ways.way(by, channel.rank) is Transport.GROUP:
                places[by] = channel.buffer(size, channel.device, "received", number, by)
                over_group.append((by, places[by]))
            else:
                places[by] = channel.buffer(size, CPU, "received", number, by)
                works.append(channel.receive(places[by], by, number))
        works += channel.among_devices([], over_group)
        notices = {neighbour: (empty_notice(len(messages)), messages) for neighbour, messages in about.items()}
        works += [channel.receive(notice, neighbour, NOTICES + number) for neighbour, (notice, _) in notices.items()]
        channel.num_received += sum(sizes.values())
        return Receiving(works, places, notices)

    def wait(self, coming: Receiving) -> dict[int, torch.Tensor]:
        """Wait for all messages; returns source -> message, [bytes] uint8."""
        for work in coming.works:
            work.wait()
        messages = dict(coming.places)
        for notice, about in coming.notices.values():
            handle, size, begins = read_notice(notice)
            if handle not in self._mapped:
                self._mapped[handle] = Mapped(handle, size, self._channel.device)
            values = self._mapped[handle].values
            messages |= {by: values[begin : begin + num] for (by, num), begin in zip(about, begins, strict=True)}
        return messages

    def done(self, coming: Receiving, number: int) -> None:
        """Tell neighbours that their shared memory has been read."""
        if coming.notices:
            self._channel.synchronize()
        for neighbour in coming.notices:
            self._channel.say(neighbour, READ + number)

    def close(self) -> None:
        """Unmap other processes' memory."""
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped = {}


class Receiver:
    """Receives transfers into an engine rank's slices.

    Args:
        channel: With the trainer.
        senders: Members that may send.
        changes: Delta updates: each round is preceded by its `DeltaHeader`s.
    """

    def __init__(self, channel: Channel, senders: Sequence[int], changes: bool = False):
        self._channel, self._changes, self.inbox = channel, changes, Inbox(channel)
        tables = {sender: channel.receive_table(sender).tolist() for sender in senders}
        self._pieces = {sender: [Piece(r, part, Box(*box)) for r, part, *box in tables[sender]] for sender in senders}
        self._num_rounds = 1 + max((piece.round for pieces in self._pieces.values() for piece in pieces), default=-1)

    def receive(self, views: Sequence[torch.Tensor]) -> int:
        """Receive one transfer into the slices, and return its bytes.


        A member that fails leaves the group, because others would wait for it.

        Args:
            views: The slices, [rows, columns] each, in order.

        Raises:
            ValueError: A message does not fit the slices.
        """
        before = self._channel.num_received
        try:
            fits = self._receive_rounds(views)
        except BaseException:
            self.inbox.close()
            self._channel.close()
            raise
        if not fits:
            raise ValueError("a message changes more elements than its parts have")
        return self._channel.num_received - before

    @torch.no_grad()
    def _receive_rounds(self, views: Sequence[torch.Tensor]) -> bool:
        """Receive round by round; returns whether all messages fit."""
        fits = True
        places: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(self._num_rounds)]
        for sender, pieces in self._pieces.items():
            for piece in pieces:
                places[piece.round].setdefault(sender, []).append(_cut(views[piece.part], piece.box))
        begun = [self._begin(places[0], 0)] if places else []
        for number, of_round in enumerate(places):
            if number + 1 < len(places):  # is received while this one is written
                begun.append(self._begin(places[number + 1], number + 1))
            coming, told = begun.pop(0)
            for sender, message in self.inbox.wait(coming).items():
                targets = of_round[sender]
                fits &= _write(message.to(targets[0].device), targets, told.get(sender, [WHOLE_PART] * len(targets)))
            self.inbox.done(coming, number)
        self._finish()
        return fits

    def _finish(self) -> None:
        """Unmap neighbours' memory so that they can free it; on a CPU it stays mapped."""
        if self._channel.device == CPU:
            return
        self.inbox.close()
        senders = [sender for sender, pieces in self._pieces.items() if pieces]
        neighbours = {self._channel.ways.neighbour(sender, self._channel.rank) for sender in senders}
        for neighbour in neighbours:
            if neighbour is not None:
                self._channel.say(neighbour, CLOSED)

    def _begin(
        self, places: Mapping[int, list[torch.Tensor]], number: int
    ) -> tuple[Receiving, dict[int, list[DeltaHeader]]]:
        """Start receiving a round; returns its senders' `DeltaHeader`s, if any."""
        told = self._told(places, number) if self._changes else {}
        sizes = {by: size_of_all(_pieces(targets, told[by]) if told else targets) for by, targets in places.items()}
        return self.inbox.begin({sender: size for sender, size in sizes.items() if size}, number), told

    def _told(self, places: Mapping[int, list[torch.Tensor]], number: int) -> dict[int, list[DeltaHeader]]:
        rows = {by: torch.empty(len(targets), HEADER_BYTES // 8, dtype=torch.int64) for by, targets in places.items()}
        for work in [self._channel.receive(table, by, TELLING + number) for by, table in rows.items()]:
            work.wait()
        self._channel.num_received += sum(table.nbytes for table in rows.values())
        return {by: [DeltaHeader(*row) for row in table.tolist()] for by, table in rows.items()}


def _cut(view: torch.Tensor, box: Box) -> torch.Tensor:
    return view[box.row : box.row + box.rows, box.column : box.column + box.columns]


def _pieces(targets: Sequence[torch.Tensor], told: Sequence[DeltaHeader]) -> list[torch.Tensor]:
    return [piece for target, of_it in zip(targets, told, strict=True) for piece in pieces_of(target, of_it)]


def _write(message: torch.Tensor, targets: Sequence[torch.Tensor], told: Sequence[DeltaHeader]) -> bool:
    """Write a message into its slices; returns whether it fits."""
    octets, fits = split(message, _pieces(targets, told)), True
    for target, of_it in zip(targets, told, strict=True):
        if of_it == WHOLE_PART:
            target.copy_(next(octets))
        elif of_it.values:
            fits &= change(target, next(octets), next(octets))
    return fits

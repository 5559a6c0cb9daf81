"""The way that weights take: from trainer ranks that have a part to engine ranks that keep it, each byte once.

All of them are members of one group. What one sends another is decided once, by the trainer, and told once; from then
on a transfer is rounds of flat messages, at most one from each sender to each receiver in a round, so that nobody
needs more memory than two rounds of it. Senders are at work at the same time, wherever they are.

Messages go over gloo, through host memory. That stands beside everything: engines on the trainer's own GPUs, of which
NCCL takes no two members, memory savers, and expandable segments, whose memory CUDA IPC cannot share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .changes import ALL_OF_IT, TOLD_BYTES, Told, change, pieces_of
from .followed import Box

# Of each piece of a message: all element sizes divide it.
ALIGNMENT_BYTES = 16
# Tags that no round has: of tables, and of what is told before a round comes.
TABLES, TELLING, CLOSING = 1 << 20, 1 << 19, 1 << 21
SHORTEST = timedelta(milliseconds=1)
ROUNDS_AT_ONCE = 2
CPU = torch.device("cpu")


class Piece(NamedTuple):
    """Something that one member sends another.

    Args:
        round: When.
        part: Which of the receiver's parts it belongs to.
        box: Which rows and columns of that part.
    """

    round: int
    part: int
    box: Box


@dataclass(frozen=True)
class Round:
    """Messages that are on their way.

    Args:
        works: Of each.
        sent: Kept until they have left.
        received: From whom -> where its message goes, on the CPU.
    """

    works: Sequence[Any]
    sent: Mapping[int, torch.Tensor]
    received: Mapping[int, torch.Tensor]

    def wait(self) -> Mapping[int, torch.Tensor]:
        """Return what has come, when all of it has, and all has left."""
        for work in self.works:
            work.wait()
        return self.received


class Channel:
    """A group of its own of trainer and engine ranks, over gloo.

    Args:
        store: Where they meet.
        rank: Of this member; trainers come first.
        size: All members.
        seconds: Within which whatever others do has to be done.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float):
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self.num_sent = self.num_received = 0

    def begin(self, sent: Mapping[int, torch.Tensor], sizes: Mapping[int, int], number: int) -> Round:
        """Begin to pass on the messages of a round.

        Args:
            sent: To whom -> message, [bytes] uint8.
            sizes: From whom -> bytes of its message.
            number: Of the round.
        """
        messages = {to: self._on_host(message, "sent", number, to) for to, message in sent.items()}
        places = {by: self.buffer(size, CPU, "received", number, by) for by, size in sizes.items()}
        works = [self._group.recv([place], by, number) for by, place in places.items()]
        works += [self._group.send([message], to, number) for to, message in messages.items()]
        self.num_sent += sum(map(len, messages.values()))
        self.num_received += sum(sizes.values())
        return Round(works, messages, places)

    def buffer(self, size: int, device: torch.device, use: str, number: int, member: int) -> torch.Tensor:
        """Return memory for a message, [size] uint8; on the host in the place of the last but one round's.

        New memory of the host would be faulted in page by page, which takes longer than to send it. A GPU's allocator
        has what it has freed, and others have use for it between two transfers.
        """
        if device != CPU:
            return torch.empty(size, dtype=torch.uint8, device=device)
        key = (use, number % ROUNDS_AT_ONCE, member)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffers[key][:size]

    def _on_host(self, message: torch.Tensor, use: str, number: int, member: int) -> torch.Tensor:
        if message.device == CPU:
            return message
        return self.buffer(len(message), CPU, use, number, member).copy_(message)

    def close(self) -> None:
        """Leave the group, as one who cannot go on: whoever waits for this member, or for one that did, ends at once.

        A wait that ends without an answer has gloo close the connections to all members; its own `abort` closes none.
        """
        for member in range(self._group.size()):
            if member != self._group.rank():
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], member, CLOSING).wait(SHORTEST)

    def send_table(self, table: torch.Tensor, to: int) -> None:
        """Tell a member something: [n, k] int64."""
        for tensor in (torch.tensor(table.shape), table.contiguous()):
            self._group.send([tensor], to, TABLES).wait()

    def receive_table(self, by: int) -> torch.Tensor:
        """Return what a member tells."""
        shape = self._received(torch.empty(2, dtype=torch.int64), by)
        return self._received(torch.empty(*shape.tolist(), dtype=torch.int64), by)

    def _received(self, place: torch.Tensor, by: int) -> torch.Tensor:
        self._group.recv([place], by, TABLES).wait()
        return place


def meet(place: str | tuple[str, int], size: int, seconds: float) -> dist.Store:
    """Return the store at a place: a file that did not exist before, or host and port where a member listens."""
    if isinstance(place, str):
        return dist.FileStore(place, size)
    host, port = place
    return dist.TCPStore(host, port, size, False, timedelta(seconds=seconds))


class Receiver:
    """What an engine rank does in a transfer.

    Args:
        channel: With the trainer.
        senders: Members that may send.
        changes: Each round is told of before it comes: of parts what has changed may come alone.
    """

    def __init__(self, channel: Channel, senders: Sequence[int], changes: bool = False):
        self._channel, self._changes = channel, changes
        tables = {sender: channel.receive_table(sender).tolist() for sender in senders}
        self._pieces = {sender: [Piece(r, part, Box(*box)) for r, part, *box in tables[sender]] for sender in senders}
        self._num_rounds = 1 + max((piece.round for pieces in self._pieces.values() for piece in pieces), default=-1)

    def receive(self, views: Sequence[torch.Tensor]) -> int:
        """Fill parts with what the trainer sends, and return how many bytes that were.

        Who cannot leaves the group: others would wait for it.

        Args:
            views: The parts, [rows, columns] each, in their order.

        Raises:
            ValueError: What came does not fit to the parts.
        """
        before = self._channel.num_received
        try:
            fits = self._receive_rounds(views)
        except BaseException:
            self._channel.close()
            raise
        if not fits:
            raise ValueError("a message changes more elements than its parts have")
        return self._channel.num_received - before

    @torch.no_grad()
    def _receive_rounds(self, views: Sequence[torch.Tensor]) -> bool:
        """Fill parts round by round, and tell whether all that came fits to them."""
        fits = True
        places: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(self._num_rounds)]
        for sender, pieces in self._pieces.items():
            for piece in pieces:
                places[piece.round].setdefault(sender, []).append(_cut(views[piece.part], piece.box))
        begun = [self._begin(places[0], 0)] if places else []
        for number, of_round in enumerate(places):
            if number + 1 < len(places):  # comes while this one is written
                begun.append(self._begin(places[number + 1], number + 1))
            coming, told = begun.pop(0)
            for sender, message in coming.wait().items():
                targets = of_round[sender]
                fits &= _write(message.to(targets[0].device), targets, told.get(sender, [ALL_OF_IT] * len(targets)))
        return fits

    def _begin(self, places: Mapping[int, list[torch.Tensor]], number: int) -> tuple[Round, dict[int, list[Told]]]:
        """Begin to receive a round; returns what its senders tell of each of its parts, where they do."""
        told: dict[int, list[Told]] = {}
        if self._changes:
            sizes = {sender: TOLD_BYTES * len(targets) for sender, targets in places.items()}
            for sender, message in self._channel.begin({}, sizes, TELLING + number).wait().items():
                told[sender] = [Told(*row) for row in message.view(torch.int64).view(-1, 2).tolist()]
        sizes = {by: _size_of(_pieces(targets, told[by]) if told else targets) for by, targets in places.items()}
        return self._channel.begin({}, {sender: size for sender, size in sizes.items() if size}, number), told


def message_of(values: Sequence[torch.Tensor], channel: Channel, number: int, receiver: int) -> torch.Tensor:
    """Return one message, [bytes] uint8, of pieces, [rows, columns] each; what is between them is not defined.

    Args:
        values: The pieces.
        channel: That sends it.
        number: Of its round.
        receiver: To whom it goes.
    """
    message = channel.buffer(_size_of(values), values[0].device, "made", number, receiver)
    for place, value in zip(_split(message, values), values, strict=True):
        place.copy_(value)
    return message


def telling_of(told: Sequence[Told]) -> torch.Tensor:
    """Return the message that tells of a round's parts, [bytes] uint8."""
    return torch.tensor(told, dtype=torch.int64).view(-1).view(torch.uint8)


def size_of(rows: int, columns: int, element_size: int) -> int:
    """Return how many bytes a piece takes in a message."""
    return -(-rows * columns * element_size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _cut(view: torch.Tensor, box: Box) -> torch.Tensor:
    return view[box.row : box.row + box.rows, box.column : box.column + box.columns]


def _pieces(targets: Sequence[torch.Tensor], told: Sequence[Told]) -> list[torch.Tensor]:
    return [piece for target, of_it in zip(targets, told, strict=True) for piece in pieces_of(target, of_it)]


def _write(message: torch.Tensor, targets: Sequence[torch.Tensor], told: Sequence[Told]) -> bool:
    """Write a message to where it belongs, and tell whether all of it fits there."""
    octets, fits = _split(message, _pieces(targets, told)), True
    for target, of_it in zip(targets, told, strict=True):
        if of_it == ALL_OF_IT:
            target.copy_(next(octets))
        elif of_it.values:
            fits &= change(target, next(octets), next(octets))
    return fits


def _size_of(pieces: Sequence[torch.Tensor]) -> int:
    return sum(size_of(len(piece), piece.shape[1], piece.element_size()) for piece in pieces)


def _split(message: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the place of each piece in a message, with its type and shape."""
    begin = 0
    for piece in pieces:
        octets = message[begin : begin + piece.numel() * piece.element_size()]
        yield octets.view(piece.dtype).view(piece.shape)
        begin += size_of(len(piece), piece.shape[1], piece.element_size())

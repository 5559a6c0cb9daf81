"""The process group of trainer and engine ranks for weight transfers.

All ranks use gloo for control messages, and for data without a faster transport (`transport`). NCCL sends messages from
GPU to GPU, all of a round at once. Senders and receivers begin rounds in the same order, which prevents deadlocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from posttrain_weights.transport import Place, Transports, exchange_places

# Tags not used by rounds: for tables, delta headers, notices, and acknowledgements.
TABLES, TELLING, NOTICES, READ, CLOSED, CLOSING = 1 << 20, 1 << 19, 1 << 18, 1 << 17, 1 << 16, 1 << 21
SHORTEST = timedelta(milliseconds=1)
ROUNDS_AT_ONCE = 2
CPU = torch.device("cpu")


class Channel:
    """A process group of trainer and engine ranks.

    Args:
        store: The rendezvous store.
        rank: Rank of this member; trainers come first.
        size: Number of members.
        seconds: Timeout of every operation.
        relays: Number of members that may relay messages for others, see `Transports`.
        device: Device of this member's weights.
        place: Its place; by default that of `Place.of`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        seconds: float,
        relays: int = 0,
        device: torch.device = CPU,
        place: Place | None = None,
    ):
        limit = timedelta(seconds=seconds)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, limit)
        self._among_devices: Any = None
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self.rank, self.device, self.num_sent, self.num_received = rank, device, 0, 0
        self.ways = Transports(exchange_places(store, place or Place.of(device), rank, size), relays)
        self._members = self.ways.group
        if rank in self._members:
            meeting = dist.PrefixStore("devices", store)
            self._among_devices = _group_of(meeting, self._members.index(rank), len(self._members), limit, device)

    def send(self, message: torch.Tensor, to: int, tag: int) -> Any:
        """Start sending a host tensor; returns a handle to wait on."""
        return self._group.send([message], to, tag)

    def receive(self, place: torch.Tensor, by: int, tag: int) -> Any:
        """Start receiving into a host tensor; returns a handle to wait on."""
        return self._group.recv([place], by, tag)

    def among_devices(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Start sending and receiving messages between GPUs, all at once.

        Args:
            sent: (member, message), for each member in its receiving order.
            received: (member, destination tensor).

        Returns:
            A handle to wait on.
        """
        if not sent and not received:
            return []
        group, rank_of = self._among_devices, self._members.index
        is_together = self.device.type == "cuda"
        if is_together:
            group._start_coalescing()
        works = [group.recv([place], rank_of(member), 0) for member, place in received]
        works += [group.send([message], rank_of(member), 0) for member, message in sent]
        return [group._end_coalescing()] if is_together else works

    def buffer(self, size: int, device: torch.device, use: str, number: int, member: int) -> torch.Tensor:
        """Return a message buffer, [size] uint8; on the host it reuses that of the round before the last.

        New host memory would be faulted in page by page, which takes longer than sending. On a GPU the caching
        allocator reuses freed memory, and others can use it between two transfers.
        """
        if device != CPU:
            return torch.empty(size, dtype=torch.uint8, device=device)
        key = (use, number % ROUNDS_AT_ONCE, member)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffers[key][:size]

    def say(self, member: int, tag: int) -> None:
        """Send a tagged signal to a member."""
        self.send(torch.zeros(1, dtype=torch.uint8), member, tag).wait()

    def hear(self, member: int, tag: int) -> None:
        """Wait for a signal from a member."""
        self.receive(torch.empty(1, dtype=torch.uint8), member, tag).wait()

    def send_table(self, table: torch.Tensor, to: int) -> None:
        """Send a table [n, k] int64 to a member."""
        for tensor in (torch.tensor(table.shape), table.contiguous()):
            self.send(tensor, to, TABLES).wait()

    def receive_table(self, by: int) -> torch.Tensor:
        """Receive a table from a member."""
        shape = self._received(torch.empty(2, dtype=torch.int64), by)
        return self._received(torch.empty(*shape.tolist(), dtype=torch.int64), by)

    def _received(self, place: torch.Tensor, by: int) -> torch.Tensor:
        self.receive(place, by, TABLES).wait()
        return place

    def close(self) -> None:
        """Abort the group: all waits of members for this one, direct or indirect, end at once.

        A wait that times out makes gloo close the connections to all members; its own `abort` closes none.
        """
        if self._among_devices and self.device.type == "cuda":
            self._among_devices.abort()
        for member in range(self._group.size()):
            if member != self.rank:
                with contextlib.suppress(RuntimeError):
                    self.receive(torch.empty(1, dtype=torch.uint8), member, CLOSING).wait(SHORTEST)

    def synchronize(self) -> None:
        """Wait for the GPU's queued work, except NCCL rounds in flight."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _group_of(store: dist.Store, rank: int, size: int, limit: timedelta, device: torch.device) -> Any:
    """Return the NCCL group of members on different GPUs, with all connections established."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group

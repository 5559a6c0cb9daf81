"""Selects the transport between two members of a transfer by the location of their weights.

    shared    same GPU, or CPUs of the same host: shared memory
    group     different GPUs: NCCL, with one member per GPU, which relays to the others on its GPU
    host      everything else: gloo, through the memory of both hosts

With colocation, trainer and engine are two processes on one GPU. NCCL is not used between them: its kernels wait for
each other, and the GPU would have to switch between the processes.
"""

from __future__ import annotations

import enum
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from posttrain_weights.shared_memory import can_share

BOOT = Path("/proc/sys/kernel/random/boot_id")
# Processes in different namespaces of these kinds count as different hosts.
NAMESPACES = ("ipc", "net", "pid")


class Transport(enum.Enum):
    """Transport of a message between two members."""

    SHARED = "shared"
    GROUP = "group"
    HOST = "host"


class Place(NamedTuple):
    """Location of a member's weights.

    Args:
        device: UUID of the GPU; empty for a CPU.
        host: Identifies processes that can share memory; unique to a process that cannot.
        nccl: The member's NCCL version, on a GPU.
    """

    device: str
    host: str
    nccl: str

    @classmethod
    def of(cls, device: torch.device) -> Place:
        """Return the place of a process with its weights on a device."""
        spaces = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in NAMESPACES]
        host = "-".join([BOOT.read_text().strip(), *spaces, str(os.getuid())])
        if device.type != "cuda":
            return cls("", host, "")
        if not can_share(device):
            host += f"-{os.getpid()}"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
        return cls(str(torch.cuda.get_device_properties(device).uuid), host, nccl)


class Transports:
    """The transports between members, the same on all members.

    Args:
        places: Place of each member.
        relays: The first `relays` members may relay messages for others on their GPU.
    """

    def __init__(self, places: Sequence[Place], relays: int):
        self._places, self._relays = [*places], relays
        there: dict[Place, list[int]] = defaultdict(list)
        for member, place in enumerate(self._places):
            there[place].append(member)
        self._first = {place: members[0] for place, members in there.items()}
        devices = [place.device for place in there]
        has_group = "" not in devices and len({*devices}) == len(devices) > 1
        self.num_members = len(self._places)
        self.has_group = has_group and len({place.nccl for place in there}) == 1 and bool(self._places[0].nccl)

    @property
    def group(self) -> list[int]:
        """NCCL's members: the first on each GPU; empty if NCCL is not used."""
        return sorted(self._first.values()) if self.has_group else []

    def deputy(self, receiver: int) -> int:
        """Return the NCCL member on a receiver's GPU, often the receiver itself."""
        return self._first[self._places[receiver]]

    def way(self, sender: int, receiver: int) -> Transport:
        """Return the transport from a trainer member to an engine member."""
        if self._places[sender] == self._places[receiver]:
            return Transport.SHARED
        deputy = self.deputy(receiver)
        is_reached = deputy == receiver or deputy < self._relays
        return Transport.GROUP if self.has_group and self.deputy(sender) == sender and is_reached else Transport.HOST

    def neighbour(self, sender: int, receiver: int) -> int | None:
        """Return the member whose shared memory a receiver reads for a sender's messages; None: it receives them."""
        way, deputy = self.way(sender, receiver), self.deputy(receiver)
        if way is Transport.SHARED:
            return sender
        return deputy if way is Transport.GROUP and deputy != receiver else None


def exchange_places(store: dist.Store, place: Place, rank: int, size: int) -> list[Place]:
    """Exchange all members' places through the first member."""
    store.set(f"place {rank}", json.dumps(place))
    if rank == 0:
        store.set("places", json.dumps([json.loads(store.get(f"place {member}")) for member in range(size)]))
    return [Place(*told) for told in json.loads(store.get("places"))]


def rendezvous(place: str | tuple[str, int], size: int, seconds: float) -> dist.Store:
    """Return the rendezvous store: a new file, or host and port on which a member listens."""
    if isinstance(place, str):
        return dist.FileStore(place, size)
    host, port = place
    return dist.TCPStore(host, port, size, False, timedelta(seconds=seconds))

"""Where members of a transfer have their weights, and which way is open between two of them.

    shared    both are on one GPU, or on the CPUs of one host: one writes, the other reads the same memory
    group     between GPUs: over NCCL, which takes one member for each GPU; the others get from that one what came
    host      whatever is left: over gloo, through the memory of both hosts

Trainer and engine are two processes on one GPU where they take turns. NCCL, whose kernels wait for each other, would
have both wait for the GPU to change between them.
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
# Processes that do not share these are as far from each other as two hosts are.
NAMESPACES = ("ipc", "net", "pid")


class Transport(enum.Enum):
    """How a message gets from one member to another."""

    SHARED = "shared"
    GROUP = "group"
    HOST = "host"


class Place(NamedTuple):
    """Where a member has its weights.

    Args:
        device: A GPU's identifier; empty for a CPU.
        host: Whose processes can share memory; of a process that cannot, itself.
        nccl: Version that a member with a GPU has.
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
    """The ways between members, alike for all of them.

    Args:
        places: Of each member.
        relays: So many members, the first ones, may pass on what comes for another on their GPU.
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
        """Members that NCCL takes: the first on each GPU; none where it takes nobody."""
        return sorted(self._first.values()) if self.has_group else []

    def deputy(self, receiver: int) -> int:
        """Return the member of the group on a receiver's GPU, often itself."""
        return self._first[self._places[receiver]]

    def way(self, sender: int, receiver: int) -> Transport:
        """Return the way from a member of the trainer to one of an engine."""
        if self._places[sender] == self._places[receiver]:
            return Transport.SHARED
        deputy = self.deputy(receiver)
        is_reached = deputy == receiver or deputy < self._relays
        return Transport.GROUP if self.has_group and self.deputy(sender) == sender and is_reached else Transport.HOST

    def neighbour(self, sender: int, receiver: int) -> int | None:
        """Return the member whose memory a receiver reads for what a sender sends it; None: it gets a message."""
        way, deputy = self.way(sender, receiver), self.deputy(receiver)
        if way is Transport.SHARED:
            return sender
        return deputy if way is Transport.GROUP and deputy != receiver else None


def exchange_places(store: dist.Store, place: Place, rank: int, size: int) -> list[Place]:
    """Exchange the places of all members through the first one."""
    store.set(f"place {rank}", json.dumps(place))
    if rank == 0:
        store.set("places", json.dumps([json.loads(store.get(f"place {member}")) for member in range(size)]))
    return [Place(*told) for told in json.loads(store.get("places"))]


def rendezvous(place: str | tuple[str, int], size: int, seconds: float) -> dist.Store:
    """Return the store at a place: a file that did not exist before, or host and port where a member listens."""
    if isinstance(place, str):
        return dist.FileStore(place, size)
    host, port = place
    return dist.TCPStore(host, port, size, False, timedelta(seconds=seconds))

"""The rendezvous of a job's ranks: a key-value store that is not reachable from outside.

torch's own store listens on all addresses of rank 0's host, whatever address it is told. Here the ranks of one machine
meet in a file instead, and those of several at one address.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

# Names a file that does not exist yet, in a folder that nobody else may enter.
FILE_VARIABLE = "POSTTRAIN_RANKS_MEET_IN"
TORCHRUN_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def join_ranks(backend: str, timeout: timedelta) -> None:
    """Make the default process group; RANK and WORLD_SIZE come from the environment.

    So does the place: the file `FILE_VARIABLE`, or MASTER_ADDR and MASTER_PORT, where rank 0 listens. Under torchrun it
    is torchrun that listens.

    Args:
        backend: "gloo" or "nccl".
        timeout: Of meeting, and of each collective.

    Raises:
        RuntimeError: The ranks do not find each other.
    """
    import torch.distributed as dist  # who only says where the others meet needs no torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get(TORCHRUN_VARIABLE) == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    path = os.environ.get(FILE_VARIABLE)
    store = dist.FileStore(path, size) if path else _store_at_one_address(rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _store_at_one_address(rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return TCPStore(host, port, size, False, timeout)
    listener = socket.create_server((host, port), backlog=size)
    return TCPStore(host, port, size, True, timeout, master_listen_fd=listener.detach())

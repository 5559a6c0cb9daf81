"""The rendezvous of a job's ranks, through a key-value store that other hosts cannot reach.

torch's own store listens on all addresses of rank 0's host, whatever address it gets. Here, ranks on one machine use a
file, and ranks on several machines use a store that listens on one address.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

# Path of a file that does not exist yet, in a folder that only this user may enter.
FILE_VARIABLE = "POSTTRAIN_RANKS_MEET_IN"
TORCHRUN_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def join_ranks(backend: str, timeout: timedelta) -> None:
    """Create the default process group; RANK and WORLD_SIZE come from the environment.

    The rendezvous is the file `FILE_VARIABLE`, or a store of rank 0 at MASTER_ADDR and MASTER_PORT, or torchrun's
    store.

    Args:
        backend: "gloo" or "nccl".
        timeout: Timeout of the rendezvous and of each collective.

    Raises:
        RuntimeError: The rendezvous failed.
    """
    import torch.distributed as dist  # processes that only render the environment need no torch

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

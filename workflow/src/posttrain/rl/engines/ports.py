"""Chooses ports for a job's servers on one machine."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"
# Below the range of ephemeral ports (32768 and up on Linux): an outgoing connection could otherwise take a port between
# its choice and the server's start.
OWN_PORTS = (20000, 32000)


def choose_free_ports(count: int, host: str = LOOPBACK, first: int = 0) -> list[int]:
    """Return distinct ports on which nothing listens now.

    Args:
        count: Number of ports.
        host: Address to check.
        first: Search upwards from this port; 0: any free ports.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = first or random.randrange(*OWN_PORTS)
            try:
                ports.append(stack.enter_context(socket.create_server((host, port))).getsockname()[1])
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            first = first and first + 1
        return ports

"""Ports for servers of a job on one machine."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"
# Below the range from which systems take ports of outgoing connections (32768 and up on Linux): one of those could take
# a port between its choice and the start of what listens there.
OWN_PORTS = (20000, 32000)


def choose_free_ports(count: int, host: str = LOOPBACK, first: int = 0) -> list[int]:
    """Return ports on which nothing listens now, all different.

    Args:
        count: How many.
        host: Address that they are for.
        first: The first ports from here on that are free; 0: any.
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

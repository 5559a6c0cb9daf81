"""What the head of a gang and its nodes say to each other: JSON objects, one per line, over TCP.

The connection is also the sign of life: when it ends, the other side has.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

# A node shows with it that it was started by the head.
TOKEN_VARIABLE = "POSTTRAIN_GANG_TOKEN"
CONNECT_SECONDS = 30.0
# An idle connection is probed, so that nothing on its way forgets it, and a host that has vanished is noticed after two
# minutes: seconds idle, seconds between probes, probes without an answer.
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
POLL_SECONDS = 0.2


class Channel:
    """One end of a connection; any thread may send, one receives.

    Args:
        connection: Connected.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """Where the other side can reach this host."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: str, **content: Any) -> bool:
        """Send a message; tells whether the other side was there to take it."""
        line = json.dumps({"kind": kind, **content}).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            return False
        return True

    def set_patience(self, seconds: float | None) -> None:
        """Count a side that says nothing for so long as gone; None: wait for ever."""
        self._connection.settimeout(seconds)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what comes in until the other side is gone, or says what is no message of ours."""
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        yield dict(json.loads(line))
        except (OSError, ValueError, TypeError):
            return

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        with self._lock:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
            finally:
                self._connection.close()


def connect(address: str) -> Channel:
    """Return a channel to "host:port".

    Raises:
        OSError: When nobody answers.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    connection.settimeout(None)
    return Channel(connection)

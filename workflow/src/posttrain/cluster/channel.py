"""Messages between a gang's head and its nodes: JSON objects, one per line, over TCP.

The connection also serves as heartbeat: it closes when the other process ends. The peer is authenticated (`handshake`)
before its messages are read.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

# The longest messages, stacks and log tails, are far shorter.
MAX_MESSAGE_BYTES = 64 << 20
# TCP keepalive keeps an idle connection in the tables of routers on its path, and detects a vanished host after two
# minutes: seconds idle, seconds between probes, unanswered probes.
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
# Time between polls of messages and child processes: short compared with any start, and hardly any CPU.
POLL_SECONDS = 0.2


class Channel:
    """One end of a connection; any thread may send, one thread receives.

    Args:
        connection: A connected socket.
        other: Name of the peer in the log.
    """

    def __init__(self, connection: socket.socket, other: str):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection, self._other = connection, other
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """The local address of this connection."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: str, **content: Any) -> bool:
        """Send a message; return False if the connection is closed."""
        line = as_line({"kind": kind, **content})
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the peer disconnects or sends an invalid message."""
        try:
            with self._connection.makefile("rb") as lines:
                while line := lines.readline(MAX_MESSAGE_BYTES):
                    if line.endswith(b"\n"):
                        yield from_line(line)
                    elif len(line) == MAX_MESSAGE_BYTES:
                        raise ValueError(f"a message of {len(line)} bytes or more")
        except OSError:
            return
        except ValueError as error:
            log.warning("%s is not listened to any more: %s", self._other, error)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with self._lock:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
            finally:
                self._connection.close()


def as_line(message: dict[str, Any]) -> bytes:
    """Serialize a message to one line."""
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Parse a line into a message.

    Raises:
        ValueError: The line is not a message.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("no message of ours")
    return message

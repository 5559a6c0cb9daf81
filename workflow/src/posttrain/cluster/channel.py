"""Messages between the head of a gang and its nodes: JSON objects, one per line, over TCP.

The connection also serves as heartbeat: when it closes, the other side has ended. The peer is authenticated
(`handshake`) before its messages are read.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

# The longest are stacks and ends of logs: far less.
MAX_MESSAGE_BYTES = 64 << 20
# An idle connection is probed, so that nothing on its way forgets it, and a host that has vanished is noticed after two
# minutes: seconds idle, seconds between probes, probes without an answer.
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
# Between two looks at messages and processes of our own: short against any start, and costs no core.
POLL_SECONDS = 0.2


class Channel:
    """One end of a connection; any thread may send, one receives.

    Args:
        connection: Connected.
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
        """The address of this host that the other side is connected to."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: str, **content: Any) -> bool:
        """Send a message; returns whether the other side was there to receive it."""
        line = as_line({"kind": kind, **content})
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the other side disconnects or sends something that is not a message of ours."""
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
        """End the connection; a second call does nothing."""
        with self._lock:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
            finally:
                self._connection.close()


def as_line(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Return the message that a line holds.

    Raises:
        ValueError: The line holds no message.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("no message of ours")
    return message
